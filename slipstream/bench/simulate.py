"""Replays acceptance traces against a table of costs: what a setting would give on that machine.

Steps of a batch are drawn from the recorded ones. A step costs one pass over the rows of all sequences, one draft and
the rest; it brings what its trees brought when they were recorded. With fewer nodes a tree keeps its most confident
ones, and its path ends where the first node is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.bench.cost_table import PLAIN, CostTable
from slipstream.bench.traces import TracedAnswer, Traces

_DRAWS = 400  # steps of a batch
_PROMPT_ROWS = 512  # rows of a prompt in one pass

SIZES = (1, 2, 4, 8, 16, 32)  # tree sizes that are tried beside the recorded one


class Scenario(NamedTuple):
    """What is asked."""

    batch: int = 1
    context: int | None = None  # tokens before each step; None: as recorded


@dataclass(frozen=True)
class Outlook:
    """What a setting would give."""

    setting: str
    nodes: int | None  # at most, of a tree; None: as recorded
    tokens_per_step: float  # of a sequence
    step_ms: float
    tokens_per_second: float  # of all sequences, prompts included
    speedup: float  # over plain decoding
    covered: bool  # within what the table was measured for

    @property
    def name(self) -> str:
        """The setting with its tree size."""
        return self.setting if self.nodes is None else f"{self.setting}, at most {self.nodes} nodes"


class _Steps:
    """The recorded steps of a setting as columns, with trees cut to `nodes`."""

    def __init__(self, answers: Sequence[TracedAnswer], nodes: int | None) -> None:
        # The first step's time is the prompt's, and most drafters have nothing to draft from yet.
        steps = [step for answer in answers for step in answer.steps[1:]] or [s for a in answers for s in a.steps]
        cut = [step.cut(nodes) for step in steps]
        self.nodes = np.array([offered for offered, _ in cut], float)
        self.tokens = np.array([tokens for _, tokens in cut], float)
        self.context = float(np.mean([step.context for step in steps]))
        self.prompt = float(np.mean([answer.prompt_tokens for answer in answers]))
        self.length = float(np.mean([sum(step.tokens for step in answer.steps) for answer in answers]))


def outlook(traces: Traces, costs: CostTable, scenario: Scenario, *, sizes: Sequence[int] = ()) -> list[Outlook]:
    """Plain decoding, then every setting with its trees as recorded and with those sizes."""
    plain = _Steps([answer for answer in traces.answers if answer.setting == PLAIN] or traces.answers, 0)
    plain.tokens[:] = 1.0
    base = _speed(plain, costs, scenario, PLAIN)
    found = [Outlook(PLAIN, None, 1.0, base[1], base[2], 1.0, base[3])]
    for setting in traces.settings:
        if setting == PLAIN:
            continue
        answers = [answer for answer in traces.answers if answer.setting == setting]
        largest = max(len(step.parents) for answer in answers for step in answer.steps)
        for nodes in (None, *(size for size in sizes if size < largest)):
            tokens, ms, speed, covered = _speed(_Steps(answers, nodes), costs, scenario, setting)
            found.append(Outlook(setting, nodes, tokens, ms, speed, speed / base[2], covered))
    return found


def best(outlooks: Sequence[Outlook]) -> Outlook:
    """The fastest."""
    return max(outlooks, key=lambda each: each.tokens_per_second)


def _speed(steps: _Steps, costs: CostTable, scenario: Scenario, setting: str) -> tuple[float, float, float, bool]:
    """Tokens per step of a sequence, milliseconds of a step, tokens per second, and whether the table covers it."""
    batch = scenario.batch
    context = steps.context if scenario.context is None else float(scenario.context)
    prompt = steps.prompt if scenario.context is None else max(1.0, scenario.context - steps.length / 2)
    drawn = np.random.default_rng(0).integers(0, len(steps.nodes), (_DRAWS, batch))
    nodes = steps.nodes[drawn]  # [draws, batch]
    rows, drafting = batch + nodes.sum(axis=1), (nodes > 0).sum(axis=1)
    usual = float(steps.nodes[steps.nodes > 0].mean()) if (steps.nodes > 0).any() else 0.0
    draft = costs.a_draft(setting, usual, batch) if usual else 0.0
    ms = float(np.mean([costs.a_pass(count, batch, context) for count in rows]))
    ms += draft * float(np.mean(drafting > 0)) + costs.other(batch)
    tokens = float(steps.tokens[drawn].mean())
    # While one prompt is read, all wait: an answer's prompt is part of the time of each answer.
    answer_ms = steps.length / tokens * ms / batch + _prefill(prompt, costs)
    return tokens, ms, 1000.0 * steps.length / answer_ms, costs.covers(float(rows.mean()), batch, context)


def _prefill(prompt: float, costs: CostTable) -> float:
    """Milliseconds to read a prompt, in passes of at most so many rows."""
    ms, done = 0.0, 0.0
    while done < prompt:
        rows = min(_PROMPT_ROWS, prompt - done)
        ms += costs.a_pass(rows, 1, done)
        done += rows
    return ms
