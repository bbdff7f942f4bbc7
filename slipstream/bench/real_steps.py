"""Real steps of the engine by the clock: small batches with each setting, for a table of costs.

A step is timed from one report to the next, with all that lies between: scheduling, the policy, the draft, the pass
with trees as they come, verification, emitting, and whatever the client's thread takes. These answers are not those
that a bench reports.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from slipstream.bench.measure import Run
from slipstream.engine import Engine
from slipstream.policy import Report

_TOKENS = 24  # of each answer
_OTHER_BATCHES = (1, 4, 16)  # beside those of the conditions, if there is time
_TURNS = 4


class RealStep(NamedTuple):
    """One step of the host runner."""

    setting: str
    sequences: int  # that gave tokens
    prompt_rows: int
    rows: int
    context: float  # tokens before a row, on average
    drafting: int  # sequences
    draft_ms: float
    ms: float  # the whole step


def real_steps(run: Run, seconds: float) -> list[RealStep]:
    """Steps of every setting at every batch size of the conditions, at others as far as `seconds` go, in turns."""
    began, found = time.monotonic(), list[RealStep]()
    asked = list(dict.fromkeys(condition.batch for condition in run.conditions))
    more = [batch for batch in _OTHER_BATCHES if batch not in asked and batch <= run.llm.engine.scheduler.max_sequences]
    for turn in range(_TURNS):
        for batch in (*asked, *more):
            for setting in run.settings:
                needed = turn == 0 and batch in asked
                if needed or time.monotonic() - began < seconds:
                    found += _steps(run, setting, batch)
    return found


def _steps(run: Run, setting: str, batch: int) -> list[RealStep]:
    places = [run.fitting[number % len(run.fitting)] for number in range(batch)]
    requests = [run.request(index, setting) for index in places]
    short = [(ids, replace(how, max_tokens=_TOKENS, ignore_eos=True)) for ids, how in requests]
    if setting == run.settings[0]:  # the others find the prompts in the cache
        run.llm.reset_prefix_cache()
    with _watched(run.llm.engine, setting) as steps:
        for _ in run.llm.answers(short, batch):
            pass
    return steps


@contextmanager
def _watched(engine: Engine, setting: str) -> Iterator[list[RealStep]]:
    """The steps of the host runner in this context, without those that read prompts while others decode."""
    steps, emit, last = list[RealStep](), engine.emit, 0.0

    def noted(report: Report) -> None:
        nonlocal last
        now = time.perf_counter()
        began = last or min((item.sequence.arrived for item in report.progress), default=0.0)
        beside = report.prompt_rows and any(item.sequence.stats.steps for item in report.progress)
        if began and report.burst is None and not beside:
            steps.append(_step(setting, report, 1000 * (now - began)))
        last = now
        emit(report)

    engine.emit = noted  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        engine.emit = emit  # type: ignore[method-assign]


def _step(setting: str, report: Report, ms: float) -> RealStep:
    given = [(item.rounds[0].drafted, len(item.sequence.tokens)) for item in report.progress]
    drafting = sum(drafted > 0 for drafted, _ in given)
    rows = sum(1 + drafted for drafted, _ in given)
    context = sum((1 + drafted) * length for drafted, length in given) / rows if rows else 0.0
    return RealStep(setting, len(given), report.prompt_rows, report.rows, context, drafting, report.draft_ms, ms)


def usual(steps: Sequence[RealStep]) -> tuple[float, float]:
    """Nodes of a tree and milliseconds of drafting for all sequences, in the median step that drafts."""
    nodes = statistics.median((step.rows - step.sequences) / step.drafting for step in steps)
    return nodes, statistics.median(step.draft_ms * step.sequences / step.drafting for step in steps)
