"""Finds the layers of a target that draft best for it (Draft & Verify, SWIFT); the finding is saved."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from slipstream import __version__
from slipstream.bench.tune.agreement import LONGEST_ANSWER, Agreement, Text
from slipstream.bench.tune.confirm import ROUNDS, Measured, confirm
from slipstream.bench.tune.costs import Clock, Costs, measure_costs
from slipstream.bench.tune.progress import TuneProgress
from slipstream.bench.tune.prompts import spread
from slipstream.bench.tune.search import Point, Search
from slipstream.drafters.layer_skip import LayerSkipDrafter, format_layers
from slipstream.errors import OptionError, PromptError
from slipstream.llm import LLM
from slipstream.models.view import TargetView
from slipstream.types import SamplingParams

FORMAT = 1
METHOD = LayerSkipDrafter.name
_LEAST_LAYERS = 3
_MOST_PROMPTS = 24
_LONGEST_PROMPT = 1024
_SHORT_ANSWER = 16  # tokens: enough to predict the time of a longer one
_FINALISTS = 3  # candidates that are confirmed by real decoding
_SHARE = 0.25  # of the budget for the reference answers, and the same for confirming


def tune(
    llm: LLM,
    prompts: Sequence[list[int]],
    budget: float,
    progress: TuneProgress | None = None,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """The finding, ready to be saved. Takes `budget` seconds, or as long as one measurement of each kind."""
    _require_layers(llm)
    return _Tuning(llm, budget, progress or TuneProgress(), seed, clock).run(prompts)


def _require_layers(llm: LLM) -> None:
    model = llm.model
    if not model.layered:
        raise OptionError(
            f"{model.name} runs through transformers, which cannot run some of its layers alone",
            hint="use a drafter that does not read the target's layers",
        )
    if model.config.layers < _LEAST_LAYERS:
        raise OptionError(
            f"{model.name} has {model.config.layers} layers: too few to choose from",
            hint=f"{_LEAST_LAYERS} or more are needed",
        )


class _Tuning:
    """One search, from the prompts to the finding."""

    def __init__(self, llm: LLM, budget: float, progress: TuneProgress, seed: int, clock: Clock) -> None:
        self._llm = llm
        self._budget = budget
        self._progress = progress
        self._seed = seed
        self._clock = clock
        self._began = clock()
        llm.use(None)
        self._target: TargetView = llm.target

    def run(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        searched, held_out = self._split(prompts)
        texts = self._answers(searched)
        costs = self._costs(texts)
        confirmed = held_out or searched
        runs = ROUNDS * (1 + _FINALISTS) * len(confirmed)
        tokens = self._affordable(runs * costs.plain)
        with Agreement(self._target, texts) as agreement:
            positions, count = agreement.positions, agreement.texts
            self._progress.tell(f"compared with {positions} tokens of the model's own answers to {count} prompts")
            frontier = self._search(agreement, costs, self._budget - runs * tokens * costs.plain)
        ranked = sorted(frontier, key=lambda point: -_score(costs, point))[:_FINALISTS]
        measured = self._confirm(ranked, costs, confirmed, tokens)
        best, speed = max(zip(ranked, measured, strict=True), key=lambda pair: pair[1].speedup)
        return {
            "format": FORMAT,
            "method": METHOD,
            "model": self._llm.model.name,
            "fingerprint": self._target.fingerprint,
            **self._described(best, costs),
            "measured": _rounded({**asdict(speed), "disturbed": speed.disturbed}),
            "confirmed": [
                {"skip": self._skipped(point), "speedup": round(result.speedup, 3)}
                for point, result in zip(ranked, measured, strict=True)
            ],
            "frontier": [self._described(point, costs) for point in frontier],
            "costs_ms": {
                "rows": [round(1000 * seconds, 3) for seconds in costs.verify],
                "head": round(1000 * costs.head, 3),
            },
            "prompts": {"searched": count, "positions": positions, "held_out": len(held_out)},
            "budget": self._budget,
            "seed": self._seed,
            "seconds": round(self._seconds(), 1),
            "device": self._target.device,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "versions": {"slipstream": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _seconds(self) -> float:
        seconds = self._clock() - self._began
        self._progress.tick(seconds)
        return seconds

    # -- prompts and answers ------------------------------------------------------------------------------------------

    def _split(self, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts to search on, and held-out prompts: every third, if there is more than one."""
        longest = min(_LONGEST_PROMPT, self._target.longest - LONGEST_ANSWER)
        short = [prompt for prompt in prompts if 0 < len(prompt) <= longest]
        if not short:
            raise PromptError(f"no prompt is usable: all have more than {longest} tokens", hint="give shorter ones")
        if left_out := len(prompts) - len(short):
            self._progress.tell(f"{left_out} of {len(prompts)} prompts are left out: more than {longest} tokens")
        chosen = spread(short, _MOST_PROMPTS)
        return [prompt for index, prompt in enumerate(chosen) if index % 3 != 1], chosen[1::3]

    def _answers(self, prompts: Sequence[list[int]]) -> list[Text]:
        """The model's own greedy answers, as long as a share of the budget allows."""
        began = self._clock()
        outputs = self._generate(prompts, _SHORT_ANSWER)
        tokens = self._affordable((self._clock() - began) / _SHORT_ANSWER)
        if tokens > _SHORT_ANSWER:
            outputs = self._generate(prompts, tokens)
        self._seconds()
        return [Text(prompt, answer) for prompt, answer in zip(prompts, outputs, strict=True)]

    def _affordable(self, per_token: float) -> int:
        """The length of answers that take their share of the budget."""
        tokens = int(self._budget * _SHARE / per_token) if per_token > 0 else LONGEST_ANSWER
        return min(LONGEST_ANSWER, max(_SHORT_ANSWER, tokens))

    def _generate(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=0)
        return [output.token_ids for output in self._llm.generate(list(prompts), params)]

    # -- searching and confirming -------------------------------------------------------------------------------------

    def _costs(self, texts: Sequence[Text]) -> Costs:
        tokens = [token for text in texts for token in text.answer]
        context = statistics.median_low(len(text.prompt) + len(text.answer) for text in texts)
        costs = measure_costs(self._target, tokens, context, self._clock)
        deep = len(costs.verify)
        self._progress.tell(
            f"a pass takes {1000 * costs.plain:.1f} ms, over {deep} rows {1000 * costs.verify[-1]:.1f} ms, "
            f"without any layer {1000 * costs.head:.1f} ms"
        )
        return costs

    def _search(self, agreement: Agreement, costs: Costs, deadline: float) -> list[Point]:
        search = Search(
            costs.layers,
            agreement,
            score=lambda point: _score(costs, point),
            expired=lambda: self._seconds() >= deadline,
            seed=self._seed,
        )
        return search.run()

    def _confirm(
        self, points: Sequence[Point], costs: Costs, prompts: Sequence[list[int]], tokens: int
    ) -> list[Measured]:
        drafters = []
        for point in points:
            depth = costs.estimate(point.agreement, len(point.layers)).depth
            drafters.append({"method": METHOD, "skip": self._skipped(point), "depth": depth, "nodes": depth})
        return confirm(
            self._llm, prompts, drafters, tokens, expired=lambda: self._seconds() >= self._budget, clock=self._clock
        )

    # -- descriptions
    # ---------------------------------------------------------------------------------------------------

    def _skipped(self, point: Point) -> str:
        return format_layers(set(range(self._target.config.layers)) - set(point.layers))

    def _described(self, point: Point, costs: Costs) -> dict[str, Any]:
        estimate = costs.estimate(point.agreement, len(point.layers))
        return {
            "skip": self._skipped(point),
            "layers_run": len(point.layers),
            "depth": estimate.depth,
            "agreement": round(point.agreement, 4),
            "estimated_speedup": round(estimate.speedup, 3),
        }


def _score(costs: Costs, point: Point) -> float:
    return costs.estimate(point.agreement, len(point.layers)).speedup


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
