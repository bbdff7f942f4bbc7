"""Compares `slipstream bench` with `benchmarks.trained` and `slipstream demo` on the prompts of those programs.

    python -m benchmarks.agreement [--speculate suffix+eagle3] [--minutes 10] [--each 8] [--tokens 96] [--threads 2]

One process, the default model, 10 minutes. Each program answers its own prompts, and then the bench answers them. For
`trained` the decode speed-up is compared; for `demo` the decode speed-up and the speed-up from arrival to last token.
Looping answers, which the bench reports separately, are included. Intervals are 95% by a bootstrap over prompts. The
interval of the ratio of two figures is paired, so differences between prompts cancel. Two figures agree if that
interval contains 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import trained
from benchmarks.acceptance import WORKLOAD, questions
from slipstream import LLM, SamplingParams
from slipstream.bench.condition_table import ConditionTable, Grouping
from slipstream.bench.intervals import Bootstrap, Column, Interval
from slipstream.bench.measure import Run
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import PLAIN, conditions
from slipstream.bench.session import run_bench
from slipstream.commands.demo import compare
from slipstream.commands.demo_prompts import PROMPTS
from slipstream.drafters.registry import parse_speculate
from slipstream.types import Stats

_DEMO_TOKENS = 128  # the default of `slipstream demo`
_PRECISION = 0.01
_SHARES = 0.75, 0.95  # parts of the time after which the questions, then the demo's prompts, are done

Times = Mapping[str, Mapping[int, tuple[float, float]]]  # setting -> prompt -> tokens, ms
Timed = tuple[float, float]


class Agreement(NamedTuple):
    """One figure of two programs."""

    what: str
    own: Interval
    bench: Interval
    ratio: Interval  # the bench's figure over the program's own

    @property
    def agree(self) -> bool:
        """Whether chance may be the whole difference."""
        return not (self.ratio.above_one or self.ratio.below_one)

    def __str__(self) -> str:
        said = "agree" if self.agree else "DO NOT AGREE"
        return f"{self.what}: {_shown(self.own)}; bench: {_shown(self.bench)}; ratio {_shown(self.ratio)}: they {said}"


def _shown(speed: Interval) -> str:
    return f"{speed.value:.3f}x" + ("" if speed.low is None else f" ({speed.low:.3f} to {speed.high:.3f})")


def agreement(what: str, setting: str, own: Times, bench: Times, strata: Sequence[str]) -> Agreement:
    """The speed-ups of both on the prompts that both answered both ways, and their paired ratio."""
    known = sorted(set.intersection(*(set(times[name]) for times in (own, bench) for name in (PLAIN, setting))))
    bootstrap = Bootstrap([strata[prompt] for prompt in known])

    def speedup(times: Times, weights: Column) -> Column:
        tokens, ms, plain_tokens, plain_ms = (
            weights @ np.array([times[name][prompt][part] for prompt in known])
            for name in (setting, PLAIN)
            for part in (0, 1)
        )
        found: Column = tokens / ms / (plain_tokens / plain_ms)
        return found

    return Agreement(
        what,
        bootstrap.interval(lambda weights: speedup(own, weights)),
        bootstrap.interval(lambda weights: speedup(bench, weights)),
        bootstrap.interval(lambda weights: speedup(bench, weights) / speedup(own, weights)),
    )


def decode(stats: Stats) -> Timed:
    """Tokens and time after the first step."""
    return stats.decoded, stats.decode_ms


def whole(stats: Stats) -> Timed:
    """All tokens, from the prompt's step on."""
    return stats.emitted, stats.prefill_ms + stats.decode_ms


def benched(llm: LLM, setting: str, asked: Iterable[tuple[str, str]], tokens: int, deadline: float) -> Run:
    """The bench on questions with their categories."""
    prompts = [
        BenchPrompt(f"{kind}/{number}", kind, ({"role": "user", "content": text},))
        for number, (kind, text) in enumerate(asked)
    ]
    run = Run(llm, prompts, [PLAIN, setting], conditions(), tokens)
    run.warm_up()
    run_bench(run, deadline, _PRECISION, lambda status: None)
    return run


def times(run: Run, *, first: bool) -> Times:
    """Tokens and ms of each prompt, medians over rounds; `first`: with the first token's time."""
    table = ConditionTable(run.answers, run.conditions[0], Grouping([p.category for p in run.prompts], {}))
    found: dict[str, dict[int, Timed]] = {}
    for setting in run.settings:
        rounds = {prompt: table.answers(setting, [(prompt, 0)]) for prompt, _ in table.keys}
        found[setting] = {
            prompt: (
                float(len(each[0].token_ids) if first else each[0].stats.decoded),
                float(np.median([answer.e2e_ms if first else answer.stats.decode_ms for answer in each])),
            )
            for prompt, each in rounds.items()
            if each
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculate", default="suffix+eagle3")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no bench goes on")
    parser.add_argument("--each", type=int, default=8, help="questions of each task")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer to a question")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    began, setting = time.monotonic(), given.speculate
    deadlines = [began + 60 * given.minutes * share for share in _SHARES]
    found = []
    with LLM(speculate=None, drafters=[setting]) as llm:
        asked = questions(WORKLOAD, given.each)
        answered = trained.answers(llm, [setting], asked, given.tokens)
        (row,) = trained.rows([setting], asked, answered)
        own = {s: {n: decode(outputs[s].stats) for n, outputs in enumerate(answered)} for s in (PLAIN, setting)}
        run = benched(llm, setting, asked, given.tokens, deadlines[0])
        print(f"benchmarks.trained says {row.overall:.3f}x on its {len(asked)} questions", flush=True)
        kinds = [kind for kind, _ in asked]
        found.append(agreement("trained, decode", setting, own, times(run, first=False), kinds))

        params = SamplingParams(temperature=0.0, max_tokens=_DEMO_TOKENS, seed=0)
        pairs = [compare(llm, prompt, parse_speculate(setting), params) for prompt in PROMPTS]
        run = benched(llm, setting, [(p.kind, p.text) for p in PROMPTS], _DEMO_TOKENS, deadlines[1])
        kinds = ["demo"] * len(PROMPTS)
        for what, read, first in (("decode", decode, False), ("end to end", whole, True)):
            own = {
                PLAIN: {number: read(pair.plain.stats) for number, pair in enumerate(pairs)},
                setting: {number: read(pair.speculative.stats) for number, pair in enumerate(pairs)},
            }
            found.append(agreement(f"demo, {what}", setting, own, times(run, first=first), kinds))
    for each in found:
        print(each)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    sys.exit(0 if all(each.agree for each in found) else 1)


if __name__ == "__main__":
    main()
