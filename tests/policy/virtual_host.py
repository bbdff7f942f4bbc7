"""The host's steps under the policy, on a clock that only counts: what passes and drafts cost and bring is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.policy import AutoPolicy, DraftCall, Progress, Report
from slipstream.policy.trust import Signal
from slipstream.sequence import TARGET, Request, Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Decision, Limits, Plan, SamplingParams

RIGHT, WRONG = 1, 0  # the tokens of all texts, and of all guesses that are rejected


def straight(plain_ms: float, row_ms: float) -> Callable[[int, int], float]:
    """A pass of `plain_ms` for the roots, and so much for each row more."""
    return lambda rows, sequences: plain_ms + row_ms * (rows - sequences)


@dataclass
class VirtualPart:
    """A drafter of chains, each level of which is right with probability `rate` and costs `level_ms`."""

    name: str
    rate: float = 0.0
    sure: float = 0.7  # the confidence that it states
    level_ms: float = 0.2
    depth: int = 6
    match: int | None = None  # of the text, if it looks for one
    by_request: bool = False
    planned: list[Plan] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.name

    @property
    def plan(self) -> Plan:
        return Plan(self.depth, self.depth, 1)

    @property
    def has_signal(self) -> bool:
        return self.match is not None

    def __hash__(self) -> int:
        return id(self)

    def host_only(self, sequence: Sequence) -> bool:
        return False

    def signal(self, sequence: Sequence) -> Signal | None:
        return None if self.match is None else Signal(self.match, 1)

    def unread(self, sequence: Sequence) -> int:
        return 0

    def draft(self, sequence: Sequence, plan: Plan, chooser: random.Random) -> TokenTree:
        self.planned.append(plan)
        tree, node, joint, right = TokenTree(sequence.tokens[-1]), 0, 1.0, True
        for _ in range(min(plan.depth, plan.nodes)):
            right = right and chooser.random() < self.rate
            joint *= self.sure
            node = tree.add(node, RIGHT if right else WRONG, origin=self.name, confidence=joint)
        return tree


@dataclass
class VirtualDrafter:
    """`auto` over some parts."""

    parts: Any
    limits: Limits = field(default_factory=Limits)
    off_device: tuple[str, ...] = ()
    exclusive: bool = False
    is_passive: bool = False
    plan: Plan = field(default_factory=Plan)

    def __hash__(self) -> int:
        return id(self)


class VirtualHost:
    """Runs steps: `pass_ms` by rows and sequences is the truth, which the policy has to find out."""

    def __init__(
        self, *parts: VirtualPart, pass_ms: Callable[[int, int], float], seed: int = 0, noise: float = 0.03
    ) -> None:
        self.parts = parts
        self.pass_ms = pass_ms
        self.noise = noise
        self.ms = 0.0
        self.beside_ms = 0.0  # of merging and checks, per sequence that drafts
        self.chooser = random.Random(seed)
        plain: Any = VirtualDrafter({})
        drafter: Any = VirtualDrafter({part.name: part for part in parts})
        self.policy = AutoPolicy({"none": plain, "auto": drafter}, None)

    def step(self, sequences: list[Sequence], prompt_rows: int = 0) -> dict[Sequence, Plan]:
        """One step of all sequences; beside them, perhaps, a part of a prompt is fed."""
        prompt = [Work(some_sequences(1)[0], [RIGHT] * prompt_rows)] if prompt_rows else []
        plans = self.policy.plan([*(Work(s, [s.tokens[-1]]) for s in sequences), *prompt], waiting=False)
        trees = {sequence: TokenTree(sequence.tokens[-1]) for sequence in sequences}
        calls, draft_ms = [], 0.0
        for number, part in enumerate(self.parts):
            asked = {s: own for s in sequences if plans[s].parts and (own := plans[s].parts[number]).drafts}
            for sequence, own in asked.items():
                trees[sequence].merge(part.draft(sequence, own, self.chooser))
            if asked:
                levels = max(own.depth for own in asked.values())
                ms = part.level_ms * (1 + levels)
                calls.append(DraftCall(part.name, len(asked), levels, ms, 0, levels == 1))
                draft_ms += ms
        if calls:
            draft_ms += self.beside_ms * max(call.sequences for call in calls)
            self.policy.drafted(draft_ms)
            trees.update(self.policy.select(trees, plans))
        rows = sum(map(len, trees.values())) + prompt_rows
        verify_ms = self.pass_ms(rows, len(sequences)) * (1 + self.noise * self.chooser.expovariate(1.0))
        items = []
        for sequence, tree in trees.items():
            path = tree.walk([RIGHT] * len(tree))
            sequence.tokens += [RIGHT] * (1 + len(path))
            sequence.output_ids += [RIGHT] * (1 + len(path))
            sequence.table.lengths[TARGET] = len(sequence.tokens) - 1
            sequence.stats.steps += 1
            items.append(Progress(sequence, new_tokens=1 + len(path), verified=(tree, path)))
        self.policy.observe(Report(items, rows, prompt_rows, draft_ms, verify_ms, calls=calls))
        self.ms += draft_ms + verify_ms
        return plans

    def run(self, sequences: list[Sequence], steps: int) -> list[Decision]:
        """So many steps; returns the decisions of all sequences."""
        before = [len(sequence.stats.decisions) for sequence in sequences]
        for _ in range(steps):
            self.step(sequences)
        return [made for s, n in zip(sequences, before, strict=True) for made in s.stats.decisions[n:]]


def some_sequences(count: int, limits: Limits | None = None, drafter: str = "auto", **how: Any) -> list[Sequence]:
    """Sequences after their prompts."""
    made = []
    for number in range(count):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1_000_000, **how})
        sequence = Sequence(Request(str(number), None, [RIGHT] * 50, params, 0), 0, frozenset(), 2_000_000)
        sequence.drafter, sequence.limits = drafter, limits
        sequence.table.lengths[TARGET] = 49
        made.append(sequence)
    return made


def drafted(decisions: list[Decision]) -> int:
    """How many decisions chose to draft."""
    return sum(bool(made.drafters) and not made.probe for made in decisions)
