"""Plays recorded answers through a batch, step by step, as the engine would: who runs, what a step costs, who waits.

So many answers run at all times. A new one's prompt is read in the same passes in which the others decode, and its
last pass gives the first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.bench.cost_table import CostTable

_PROMPT_ROWS = 512  # of all prompts in one pass


class Decoded(NamedTuple):
    """A step of an answer after its first: tokens before it, nodes offered, tokens emitted."""

    context: float
    nodes: int
    tokens: int


class Recorded(NamedTuple):
    """An answer; its first token comes with its prompt."""

    prompt: int
    steps: Sequence[Decoded]


@dataclass
class Played:
    """What came of it, in milliseconds."""

    tokens: int = 0
    e2e_ms: float = 0.0  # of all answers, from when they were asked
    full_tokens: int = 0  # while answers waited for a place
    full_ms: float = 0.0
    steps: int = 0  # in which all places decoded, without a prompt
    step_ms: float = 0.0  # of those
    rows: float = 0.0  # of those

    @property
    def tokens_per_ms(self) -> float:
        """While every place is taken."""
        return self.full_tokens / self.full_ms


@dataclass
class _Running:
    """An answer in a place of the batch."""

    answer: Recorded
    asked: float
    read: int = 0  # tokens of the prompt
    done: int = 0  # steps
    fed: int = field(default=0)  # rows of the prompt in this pass

    @property
    def decoding(self) -> bool:
        return self.read == self.answer.prompt


def play(answers: Iterable[Recorded], places: int, costs: CostTable, drafter: str, usual_nodes: float) -> Played:
    """Play answers in this order, `places` at a time, all asked as places become free. `drafter`: in `costs`."""
    waiting, running, found, now = deque(answers), list[_Running](), Played(), 0.0
    while waiting or running:
        while waiting and len(running) < places:
            running.append(_Running(waiting.popleft(), now))
        full = bool(waiting)
        decoding, ms, rows = _step(running, costs, drafter, usual_nodes)
        now += ms
        emitted = 0
        for each in decoding:
            emitted += each.answer.steps[each.done].tokens
            each.done += 1
        for each in running:
            if each.fed:
                each.read += each.fed
                emitted += each.decoding  # the first token
        found.tokens += emitted
        if full:
            found.full_tokens, found.full_ms = found.full_tokens + emitted, found.full_ms + ms
        if len(decoding) == places:
            found.steps, found.step_ms, found.rows = found.steps + 1, found.step_ms + ms, found.rows + rows
        ended = [each for each in running if each.decoding and each.done == len(each.answer.steps)]
        found.e2e_ms += sum(now - each.asked for each in ended)
        running = [each for each in running if each not in ended]
    return found


def _step(
    running: Sequence[_Running], costs: CostTable, drafter: str, usual_nodes: float
) -> tuple[list[_Running], float, float]:
    """Who decodes in a step, its milliseconds and its rows."""
    decoding = [each for each in running if each.decoding]
    rows = context = 0.0
    for each in decoding:
        step = each.answer.steps[each.done]
        rows += 1 + step.nodes
        context += (1 + step.nodes) * step.context
    budget = _PROMPT_ROWS
    for each in running:
        each.fed = min(budget, each.answer.prompt - each.read)
        budget -= each.fed
        rows += each.fed
        context += each.fed * (each.read + each.fed / 2)
    sequences = len(decoding) + sum(each.fed > 0 for each in running)
    ms = costs.a_pass(rows, sequences, context / rows) + costs.other(sequences)
    drafting = sum(each.answer.steps[each.done].nodes > 0 for each in decoding)
    if drafting:
        ms += costs.a_draft(drafter, usual_nodes, len(decoding)) * drafting / len(decoding)
    return decoding, ms, rows
