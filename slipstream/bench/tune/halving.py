"""Finds the best setting on given prompts by successive halving: many on a few prompts, few on many.

Every round asks fresh prompts with all settings that are left, interleaved with plain decoding, and drops the slower
half: first of methods, then of tree sizes of the best one and of limits for `auto`. The best of either kind then meet
`auto` as it comes until the time is up: what is recommended comes with an interval.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.condition_table import ALL, ConditionTable, Grouping
from slipstream.bench.intervals import Interval
from slipstream.bench.measure import Answer, Run
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import PLAIN, Condition, Schedule, Turn, stratified
from slipstream.bench.tune.candidates import limits, sizes
from slipstream.bench.tune.progress import TuneProgress
from slipstream.llm import LLM

AUTO = "auto"
_METHODS, _SIZES = 0.35, 0.6  # parts of the time after which methods, then tree sizes and limits, are decided
_FINALISTS = 2

Open = Callable[[list[str]], LLM]
Json = dict[str, Any]
Speeds = dict[str, Interval]


@dataclass
class Finding:
    """What a search found."""

    best: str  # the fastest finalist
    speedups: dict[str, Speeds]  # condition -> setting -> over plain decoding, of the finalists
    over_auto: dict[str, Interval]  # condition -> the best over `auto`
    by_category: Speeds  # of the best, under the first condition
    tried: dict[str, float] = field(default_factory=dict)  # setting -> speed-up when it was dropped, or at the end
    prompts: int = 0
    setup: str = ""  # what costs were measured on
    policy: Json = field(default_factory=dict)  # what the policy learnt in the finals
    methods: dict[str, Speeds] = field(default_factory=dict)  # method -> category, or all -> speed-up when first tried

    @property
    def recommended(self) -> str:
        """The best if it is shown to be faster than `auto`, else `auto`; plain decoding where that does not pay."""
        over = self.over_auto.values()
        better = any(speed.above_one for speed in over) and not any(speed.below_one for speed in over)
        chosen = self.best if better else AUTO
        return chosen if overall(self.speedups, chosen) > 1.0 else PLAIN


def overall(speedups: dict[str, Speeds], setting: str) -> float:
    """The geometric mean of a setting's speed-ups over all conditions."""
    return math.prod(each[setting].value for each in speedups.values()) ** (1 / len(speedups))


class Halving:
    """One search."""

    def __init__(
        self,
        opened: Open,
        prompts: list[BenchPrompt],
        conditions: list[Condition],
        tokens: int,
        progress: TuneProgress | None = None,
    ) -> None:
        self._open, self._prompts, self._conditions = opened, prompts, conditions
        self._tokens, self._progress = tokens, progress or TuneProgress()
        self._tried: dict[str, float] = {}
        self._methods: dict[str, Speeds] = {}
        self._answers = 0
        names = [prompt.category for prompt in prompts]
        self._grouping = Grouping(names, dict(Counter(names)))

    def search(self, methods: Sequence[str], deadline: float) -> Finding:
        """Methods, then tree sizes of the best one and limits for `auto`, then the finals."""
        began = time.monotonic()
        best = self._halved(list(methods), began + _METHODS * (deadline - began), first=True)[0]
        fixed, limited = [best, *sizes(best)], limits(best)
        ranked = self._halved([*fixed, *limited], began + _SIZES * (deadline - began))

        def place(name: str) -> tuple[bool, float]:
            return name in ranked, self._tried[name]  # what was not dropped, before what was

        return self._finals([max(fixed, key=place), max(limited, key=place), AUTO], deadline)

    def _halved(self, settings: list[str], deadline: float, *, first: bool = False) -> list[str]:
        """The settings in order of their speed, the best two at least measured to the end."""
        llm = self._open([PLAIN, *settings])
        run, order = self._run(llm, settings)
        rounds = max(1, math.ceil(math.log2(max(2, len(settings) / _FINALISTS))))
        left = settings
        ranked = list(settings)
        for number in range(rounds):
            now = time.monotonic()
            # All rounds ask about as many prompts: else the first, with the most settings, would be the least precise.
            part = 1 / sum(2.0**-later for later in range(rounds - number))
            until = now + part * max(0.0, deadline - now)
            share = order[number * len(order) // rounds : (number + 1) * len(order) // rounds] or order
            self._measure(run, share, left, until)
            speeds = self._ranks(run.answers, left)
            ranked = sorted(left, key=lambda name: -speeds[name])
            self._tried.update(speeds)
            if first and number == 0:
                self._methods = self._by_category(run.answers, left)
            left = ranked[: max(_FINALISTS, math.ceil(len(ranked) / 2))]
            self._progress.tell(", ".join(f"{name} {speeds[name]:.2f}x" for name in ranked))
        llm.close()
        return ranked

    def _finals(self, settings: list[str], deadline: float) -> Finding:
        llm = self._open([PLAIN, *settings])
        run, order = self._run(llm, settings)
        self._measure(run, order, settings, deadline)
        setup, policy = llm.learnt()
        llm.close()
        tables = [self._table(run.answers, number) for number in range(len(self._conditions))]
        speedups = {str(t.condition): {s: t.speedup(s, t.chosen(ALL) or t.keys) for s in settings} for t in tables}
        for each in speedups.values():
            each[PLAIN] = Interval(1.0, 1.0, 1.0)
        self._tried.update({s: round(overall(speedups, s), 3) for s in settings})
        best = max(settings, key=lambda s: overall(speedups, s))
        over = {str(t.condition): t.ratio(best, AUTO, t.chosen(ALL) or t.keys) for t in tables}
        first = tables[0]
        by_category = {name: first.speedup(best, first.chosen(name)) for name in first.categories}
        asked = len({prompt for prompt, _ in first.keys})
        return Finding(best, speedups, over, by_category, self._tried, asked, setup, policy, self._methods)

    def _run(self, llm: LLM, settings: Sequence[str]) -> tuple[Run, list[int]]:
        run = Run(llm, self._prompts, [PLAIN, *settings], self._conditions, self._tokens)
        order = [run.fitting[place] for place in stratified([run.prompts[index] for index in run.fitting])]
        run.warm_up()
        return run, order

    def _measure(self, run: Run, order: Sequence[int], settings: Sequence[str], until: float) -> None:
        schedule = Schedule(order, self._conditions, [PLAIN, *settings], until)

        def after(turn: Turn) -> None:
            self._answers += sum(len(turn.prompts) for _ in turn.settings)
            self._progress.show(self._answers, f"{len(settings)} settings left")

        run.measure(schedule, after)

    def _table(self, answers: Sequence[Answer], number: int) -> ConditionTable:
        chosen = [answer for answer in answers if answer.condition == number]
        return ConditionTable(chosen, self._conditions[number], self._grouping)

    def _by_category(self, answers: Sequence[Answer], settings: Sequence[str]) -> dict[str, Speeds]:
        """Each setting's speed-ups under the first condition, by category and over all."""
        table = self._table(answers, 0)
        found = {name: table.chosen(name) for name in (ALL, *table.categories)}
        return {s: {name: table.speedup(s, keys) for name, keys in found.items() if keys} for s in settings}

    def _ranks(self, answers: Sequence[Answer], settings: Sequence[str]) -> dict[str, float]:
        """The geometric mean over conditions of the speed-ups, on prompts that all of these settings have answered."""
        kept = [answer for answer in answers if answer.setting in (PLAIN, *settings)]
        found = dict.fromkeys(settings, 1.0)
        for number in range(len(self._conditions)):
            table = self._table(kept, number)
            for name in settings:
                found[name] *= table.speedup(name, table.keys).value
        return {name: round(value ** (1 / len(self._conditions)), 3) for name, value in found.items()}
