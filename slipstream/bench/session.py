"""One bench from start to end: measure until the figures are precise or the time is up, then put them together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from slipstream.bench.condition_table import ALL, LOOPING, ConditionTable, Grouping
from slipstream.bench.figures import Json, figures
from slipstream.bench.measure import Answer, Run
from slipstream.bench.results import FORMAT, VERSION, peak_memory
from slipstream.bench.schedule import PLAIN, Condition, Schedule, Turn, stratified
from slipstream.bench.verdicts import verdicts

_LOOK_EVERY = 4  # groups of prompts between two looks at the intervals
_LEAST = 2  # prompts of each category before a run may end early


class Status(NamedTuple):
    """How far a run is, for a progress bar."""

    answers: int
    part: float  # of the time that it may take
    text: str


def run_bench(
    run: Run, deadline: float, precision: float, show: Callable[[Status], None], *, repeats: bool = True
) -> None:
    """Measure until `deadline` (of `time.monotonic`), or until the speed-ups over all are within `precision`.

    `repeats`: prompts may be asked again when all were; not if a drafter remembers earlier answers.
    """
    began = time.monotonic()
    order = [run.fitting[place] for place in stratified([run.prompts[index] for index in run.fitting])]
    schedule = Schedule(order, run.conditions, run.settings, deadline, repeats=repeats)
    grouping = _grouping(run)
    turns = 0

    def after(turn: Turn) -> None:
        nonlocal turns
        turns += 1
        text = ""
        if turns % _LOOK_EVERY == 0 or turns == 1:
            table = _table(run, turn.condition, grouping)
            keys = table.chosen(ALL)
            speeds = {s: table.speedup(s, keys) for s in table.settings if s != PLAIN} if keys else {}
            sampled = Counter(run.prompts[prompt].category for prompt, _ in keys)
            known = {run.prompts[index].category for index in order}
            enough = all(sampled[c] >= _LEAST for c in known) or turn.round > 0
            schedule.tight[turn.condition] = bool(
                enough and speeds and all(s.spread <= precision for s in speeds.values())
            )
            if enough:
                schedule.plain_every[turn.condition] = table.plain_every()
            text = ", ".join(f"{name} {speed.value:.2f}x" for name, speed in speeds.items())
        part = (time.monotonic() - began) / max(1e-9, deadline - began)
        show(Status(len(run.answers), min(1.0, part), text))

    run.measure(schedule, after)


def _grouping(run: Run) -> Grouping:
    names = [prompt.category for prompt in run.prompts]
    return Grouping(names, dict(Counter(names)))


def _table(run: Run, number: int, grouping: Grouping) -> ConditionTable:
    answers = [answer for answer in run.answers if answer.condition == number]
    return ConditionTable(answers, run.conditions[number], grouping)


def results(run: Run, provenance: Json, price_per_hour: float | None = None) -> Json:
    """Everything for `results.json` but the samples."""
    grouping = _grouping(run)
    tables = [_table(run, number, grouping) for number in range(len(run.conditions))]
    found = [_condition(table, price_per_hour) for table in tables]
    names = list(dict.fromkeys(grouping.categories))
    model = run.llm.model
    return {
        "format": FORMAT,
        "version": VERSION,
        **provenance,
        "model": {
            "name": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device,
            "quantize": run.llm.quantize,
            "exact": run.llm.exact,
        },
        "workload": {
            "prompts": len(run.prompts),
            "categories": dict(Counter(grouping.categories)),
            "skipped": run.skipped,
            "tokens": run.tokens,
            "tools_as_text": run.encoder.tools_as_text,
        },
        "settings": run.settings,
        "conditions": found,
        "verdicts": verdicts(found[0]["figures"], [n for n in names if n in tables[0].categories]),
        "peak_memory": peak_memory(model.device),
        "answers": [_row(answer, run) for answer in run.answers],
    }


def _condition(table: ConditionTable, price: float | None) -> Json:
    found = {
        setting: {category: figures(table, setting, category) for category in (ALL, *table.categories, LOOPING)}
        for setting in table.settings
    }
    if price is not None:
        for by_category in found.values():
            for each in by_category.values():
                if each is not None:
                    each["cost_per_million_tokens"] = cost_per_million(price, each["tok_s"][0])
    return {"condition": asdict(table.condition), "name": str(table.condition), "figures": found}


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float | None:
    """What a million output tokens cost on a machine of this price."""
    return round(price_per_hour / 3600 / tokens_per_second * 1e6, 4) if tokens_per_second else None


def _row(answer: Answer, run: Run) -> Json:
    """One answer: enough to compute every ratio again, and to compare two runs prompt by prompt."""
    stats = answer.stats
    return {
        "condition": answer.condition,
        "setting": answer.setting,
        "prompt": run.prompts[answer.prompt].name,
        "category": run.prompts[answer.prompt].category,
        "turn": answer.turn,
        "round": answer.round,
        "group": answer.group,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.token_ids),
        "ttft_ms": round(answer.ttft_ms, 3),
        "e2e_ms": round(answer.e2e_ms, 3),
        "decode_ms": round(stats.decode_ms, 3),
        "decoded": stats.decoded,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


def conditions_of(results: Json) -> list[Condition]:
    """The conditions of saved results."""
    return [Condition(**each["condition"]) for each in results["conditions"]]
