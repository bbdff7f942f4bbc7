"""Replays acceptance traces against a table of costs: what a setting would give on that machine.

A step brings what its trees brought when they were recorded (`replay.py` has what it costs). With fewer nodes a tree
keeps its most confident ones, and its path ends where the first node is missing. `auto` is played with the tree sizes
that pay best: which it takes depends on the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import mean
from typing import NamedTuple

from slipstream.bench.cost_table import PLAIN, CostTable
from slipstream.bench.replay import Decoded, Recorded, play
from slipstream.bench.traces import TracedAnswer, Traces

_ROUNDS = 4  # answers per place of a batch, so that the beginning and the end count little
_POLICY = "auto"

SIZES = (1, 2, 4, 8, 16, 32)  # tree sizes that are tried beside the recorded one


class Scenario(NamedTuple):
    """What is asked."""

    batch: int = 1
    context: int | None = None  # tokens before each step; None: as recorded
    group: int | None = None  # answers that are asked together, as `bench` does; None: places are never empty


@dataclass(frozen=True)
class Outlook:
    """What a setting would give."""

    setting: str
    nodes: int | None  # at most, of a tree; None: as recorded
    tokens_per_step: float  # of a sequence
    step_ms: float  # while all places decode
    tokens_per_second: float  # of all sequences, prompts included
    speedup: float  # over plain decoding
    covered: bool  # within what the table was measured for

    @property
    def name(self) -> str:
        """The setting with its tree size."""
        return self.setting if self.nodes is None else f"{self.setting}, at most {self.nodes} nodes"


def outlook(traces: Traces, costs: CostTable, scenario: Scenario, *, sizes: Sequence[int] = ()) -> list[Outlook]:
    """Plain decoding, then every setting with its trees as recorded and with those sizes."""
    # Plain answers depend on lengths alone, and fewer of them may have been recorded.
    most = max(traces.settings, key=lambda name: sum(answer.setting == name for answer in traces.answers))
    plain = [answer for answer in traces.answers if answer.setting == most]
    base = _outlook([plainly(answer, scenario.context) for answer in plain], costs, scenario, PLAIN, None)
    found = [base]
    for setting in traces.settings:
        if setting == PLAIN:
            continue
        answers = [answer for answer in traces.answers if answer.setting == setting]
        largest = max((len(step.confidence) for answer in answers for step in answer.steps), default=0)
        drafter = costs.drafting(setting, sorted({name for answer in answers for name in answer.drafters}))
        policy = setting.partition(":")[0] == _POLICY
        tried = []
        for nodes in (None, *(size for size in (SIZES if policy else sizes) if size < largest)):
            played = [recorded(answer, nodes, scenario.context) for answer in answers]
            tried.append(_outlook(played, costs, scenario, drafter, nodes, base))
        if policy:
            tried = [replace(max([base, *tried], key=_speed), nodes=None)]
        found += [replace(each, setting=setting) for each in tried]
    return found


def best(outlooks: Sequence[Outlook]) -> Outlook:
    """The fastest outlook."""
    return max(outlooks, key=_speed)


def _speed(outlook: Outlook) -> float:
    return outlook.tokens_per_second


def recorded(
    answer: TracedAnswer, nodes: int | None = None, context: int | None = None, tokens: int | None = None
) -> Recorded:
    """An answer of so many tokens (None: as it was) with trees of at most so many nodes. Its steps come again."""
    length, steps = (_length(answer) if tokens is None else tokens) - 1, list[Decoded]()
    for step in cycle(answer.steps[1:]) if len(answer.steps) > 1 else ():
        if length <= 0:
            break
        offered, given = step.cut(nodes)
        steps.append(Decoded(step.context if context is None else context, offered, min(given, length)))
        length -= given
    return Recorded(_prompt(answer, context), steps)


def plainly(answer: TracedAnswer, context: int | None = None, tokens: int | None = None) -> Recorded:
    """An answer as plain decoding gives it."""
    begin, count = answer.steps[0].context, _length(answer) if tokens is None else tokens
    contexts = (begin + place if context is None else context for place in range(1, count))
    return Recorded(_prompt(answer, context), [Decoded(each, 0, 1) for each in contexts])


def _length(answer: TracedAnswer) -> int:
    return sum(step.tokens for step in answer.steps)


def _prompt(answer: TracedAnswer, context: int | None) -> int:
    return answer.prompt_tokens if context is None else max(1, context - _length(answer) // 2)


def usual_nodes(answers: Iterable[Recorded]) -> float:
    """Nodes of a step that drafts."""
    drafting = [step.nodes for answer in answers for step in answer.steps if step.nodes]
    return mean(drafting) if drafting else 0.0


def _outlook(
    answers: Sequence[Recorded],
    costs: CostTable,
    scenario: Scenario,
    drafter: str,
    nodes: int | None,
    plain: Outlook | None = None,
) -> Outlook:
    usual, batch = usual_nodes(answers), scenario.batch
    if scenario.group is None:
        count = max(len(answers), _ROUNDS * batch)
        played = [play(islice(cycle(answers), count), batch, costs, drafter, usual)]
        speed = 1000 * (played[0].tokens / played[0].e2e_ms if batch == 1 else played[0].tokens_per_ms)
    else:
        played = [
            play(islice(cycle(answers), start, start + scenario.group), batch, costs, drafter, usual)
            for start in range(0, len(answers), scenario.group)
        ]
        speed = 1000 * batch * sum(each.tokens for each in played) / sum(each.e2e_ms for each in played)
    steps = [step for answer in answers for step in answer.steps] or [Decoded(answers[0].prompt, 0, 1)]
    rows, context = batch * (1 + mean(step.nodes for step in steps)), mean(step.context for step in steps)
    drafting = sum(step.nodes > 0 for step in steps) / len(steps)
    draft_ms = costs.a_draft(drafter, usual, batch) * drafting if drafting else 0.0
    return Outlook(
        setting=drafter,
        nodes=nodes,
        tokens_per_step=mean(step.tokens for step in steps),
        step_ms=costs.a_pass(rows, batch, context) + draft_ms + costs.other(batch),
        tokens_per_second=speed,
        speedup=1.0 if plain is None else speed / plain.tokens_per_second,
        covered=costs.covers(rows, batch, context),
    )
