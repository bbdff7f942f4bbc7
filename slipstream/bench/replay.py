"""Plays recorded answers through a batch, step by step, as the engine would: who runs, what a step costs, who waits.

So many answers run at a time. On a CPU a new one's prompt is read in the same passes in which the others decode. On a
device steps run in bursts of rounds: the place of an answer that has ended stays empty until its burst is over, and
prompts are read in passes of their own, beside short bursts. The last pass of a prompt gives the first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.bench.cost_table import PLAIN, CostTable
from slipstream.policy.sizes import SHARED_ROUNDS, most_rounds, stops_burst

_ADMITTED = 8  # answers are asked when 1 / _ADMITTED of the places are free, so that most steps have no prompt


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
    """The result of a replay: tokens and milliseconds."""

    tokens: int = 0
    ms: float = 0.0
    e2e_ms: float = 0.0  # of all answers, from when they were asked
    full_tokens: int = 0  # while answers waited for a place
    full_ms: float = 0.0
    decoded: int = 0  # tokens while all places decoded, and no prompt was read
    decoding_ms: float = 0.0

    @property
    def tokens_per_ms(self) -> float:
        """Tokens per millisecond while every place is taken."""
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
    def reading(self) -> bool:
        return self.read < self.answer.prompt

    @property
    def ended(self) -> bool:
        return not self.reading and self.done == len(self.answer.steps)

    @property
    def step(self) -> Decoded:
        """The next step. A lane whose answer ended within a burst repeats the last step."""
        return self.answer.steps[min(self.done, len(self.answer.steps) - 1)]

    def decode(self) -> int:
        """Take a step; returns its tokens."""
        tokens = 0 if self.ended else self.step.tokens
        self.done = min(self.done + 1, len(self.answer.steps))
        return tokens


def play(answers: Iterable[Recorded], places: int, costs: CostTable, drafter: str, usual_nodes: float) -> Played:
    """Play answers in this order, `places` at a time, all asked as places become free. `drafter`: in `costs`."""
    waiting, running, found = deque(answers), list[_Running](), Played()
    while waiting or running:
        if places - len(running) >= places / _ADMITTED:
            while waiting and len(running) < places:
                running.append(_Running(waiting.popleft(), found.ms))
        emitted, ms = _burst(running, costs, drafter, usual_nodes)
        found.tokens, found.ms = found.tokens + emitted, found.ms + ms
        if waiting:
            found.full_tokens, found.full_ms = found.full_tokens + emitted, found.full_ms + ms
        if len(running) == places and not any(each.fed for each in running):
            found.decoded, found.decoding_ms = found.decoded + emitted, found.decoding_ms + ms
        found.e2e_ms += sum(found.ms - each.asked for each in running if each.ended)
        running = [each for each in running if not each.ended]
    return found


def _burst(running: Sequence[_Running], costs: CostTable, drafter: str, usual_nodes: float) -> tuple[int, float]:
    """Tokens and milliseconds of the steps that run together: of one, or on a device of several rounds."""
    decoding = [each for each in running if not each.reading]
    _feed(running, costs.prompt_rows)
    fed = [each for each in running if each.fed]
    emitted, ms, rounds = 0, 0.0, 1
    if costs.rounds:
        ms = _step_ms([], fed, costs, drafter, usual_nodes) if fed else 0.0
        drafts = any(each.step.nodes for each in decoding)
        rounds = SHARED_ROUNDS if fed else most_rounds(drafts=drafts, passive=drafter == PLAIN)
    for _ in range(rounds if decoding else 0):
        ms += _step_ms(decoding, [] if costs.rounds else fed, costs, drafter, usual_nodes)
        emitted += sum(each.decode() for each in decoding)
        if stops_burst(sum(each.ended for each in decoding), len(decoding)):
            break
    if not decoding and not costs.rounds:
        ms = _step_ms([], fed, costs, drafter, usual_nodes)
    for each in fed:
        each.read += each.fed
        emitted += not each.reading  # the first token
    return emitted, ms


def _feed(running: Sequence[_Running], rows: int) -> None:
    """Which rows of prompts are read: the oldest answer's first."""
    for each in running:
        each.fed = min(rows, each.answer.prompt - each.read)
        rows -= each.fed


def _step_ms(
    decoding: Sequence[_Running], fed: Sequence[_Running], costs: CostTable, drafter: str, usual_nodes: float
) -> float:
    """Milliseconds of a step."""
    rows = context = 0.0
    for each in decoding:
        rows += 1 + each.step.nodes
        context += (1 + each.step.nodes) * each.step.context
    for each in fed:
        rows += each.fed * costs.prompt_row
        context += each.fed * costs.prompt_row * (each.read + each.fed / 2)
    sequences = len(decoding) + len(fed)
    ms = costs.a_pass(rows, sequences, context / rows) + costs.other(sequences)
    drafting = sum(each.step.nodes > 0 for each in decoding)
    if drafting:
        ms += costs.a_draft(drafter, usual_nodes, len(decoding)) * drafting / len(decoding)
    return ms
