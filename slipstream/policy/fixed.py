"""The fixed policy: the drafter's options, cut to what a sequence can still use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from weakref import WeakKeyDictionary

from slipstream.policy import sizes
from slipstream.policy.base import Drafts, HasPlan, Rounds
from slipstream.policy.burst_planner import BurstPlanner
from slipstream.policy.report import Report
from slipstream.policy.trust import ChainCost, Trust
from slipstream.sequence import Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Plan

_TRUST = "policy.trust"  # key in `Sequence.drafting`


class FixedPolicy:
    """One plan for all sequences of a drafter, except near the end of the sequence or of the context.

    On a device all sequences of one drafter share a burst, which is short while the host has work; those with a grammar
    have bursts of one round. A drafter with a signal gets few rounds until its drafts have been accepted.
    """

    def __init__(
        self, drafters: Mapping[str, Drafts], rounds: Rounds | None = None, planner: BurstPlanner | None = None
    ) -> None:
        """`planner`: of the bursts of drafters with parts."""
        self._drafters = drafters
        self._rounds = rounds
        self._planner = planner
        self._host_plans: WeakKeyDictionary[HasPlan, Plan] = (
            WeakKeyDictionary()
        )  # cached: a drafter parses its options for it

    def plan(self, work: Seq[Work], *, waiting: bool) -> dict[Sequence, Plan]:
        """Host plans come from the drafter's options; sequences that rounds support share a burst."""
        bursts: defaultdict[tuple[str, bool], list[Sequence]] = defaultdict(list)
        plans: dict[Sequence, Plan] = {}
        for item in work:
            sequence = item.sequence
            if not item.decodes:
                plans[sequence] = Plan()
            elif self._in_rounds(item):
                bursts[sequence.active_drafter, sequence.constraint is not None].append(sequence)
            else:
                plans[sequence] = self.single(sequence)
        shapes = {group: self._shape(*group, len(sequences)) for group, sequences in bursts.items()}
        by_host = [sequence for group, sequences in bursts.items() if shapes[group] is None for sequence in sequences]
        plans.update((sequence, self.single(sequence)) for sequence in by_host)
        served = {group: shape for group, shape in shapes.items() if shape is not None}
        shared = len(plans) > 0 or len(served) > 1
        for (name, constrained), shape in served.items():
            sequences = bursts[name, constrained]
            plan = self._burst(name, shape, sequences)
            most = 1 if constrained else sizes.SHARED_ROUNDS if shared else plan.rounds
            ahead = plan.ahead and not (constrained or shared or waiting)
            plans.update(dict.fromkeys(sequences, replace(plan, rounds=min(plan.rounds, most), ahead=ahead)))
        return plans

    def _in_rounds(self, item: Work) -> bool:
        """Whether rounds support what a sequence asks for, and the limits within which its drafters are planned."""
        if self._rounds is None or not self._rounds.serves(item):
            return False
        apart = self._drafters[item.sequence.active_drafter].parts
        return not apart or (self._planner is not None and self._planner.takes(item.sequence))

    def _shape(self, drafter: str, constrained: bool, count: int) -> Plan | None:
        return None if self._rounds is None else self._rounds.shape(drafter, count, constrained=constrained)

    def host_plan(self, drafter: HasPlan) -> Plan:
        """The drafter's own plan of a host step."""
        plan = self._host_plans.get(drafter)
        if plan is None:
            plan = self._host_plans[drafter] = drafter.plan
        return plan

    def single(self, sequence: Sequence) -> Plan:
        """The plan by the drafter's options."""
        wanted = self.host_plan(self._drafters[sequence.active_drafter])
        # The target adds one token to the accepted ones, so a draft of `remaining` tokens could not be used in full.
        depth = min(wanted.depth, sequence.remaining - 1)
        return replace(wanted, depth=depth) if depth > 0 and wanted.nodes > 0 else Plan()

    def _burst(self, name: str, shape: Plan, sequences: list[Sequence]) -> Plan:
        """A burst while no other work waits."""
        drafter = self._drafters[name]
        if drafter.parts and self._planner is not None:
            return self._planner.burst(name, sequences)
        most = sizes.most_rounds(drafts=shape.drafts, passive=drafter.is_passive)
        assert self._rounds is not None
        signals = [] if drafter.is_passive else [self._rounds.signal(sequence) for sequence in sequences]
        if not signals or None in signals:  # it always drafts, or never
            return replace(shape, rounds=most, ahead=True)
        cost = ChainCost.of(1.0, self._rounds.chain_cost(shape, len(sequences)))
        trusts: list[Trust] = [sequence.drafting.setdefault(_TRUST, Trust()) for sequence in sequences]
        asking = [
            trust.ask(signal.matched, sequence.stats, cost.least_match(signal.least), cost.extra)
            for trust, sequence, signal in zip(trusts, sequences, signals, strict=True)
            if signal is not None
        ]
        if not any(asking):
            return Plan(rounds=sizes.WAITING_ROUNDS)
        for trust, sequence in zip(trusts, sequences, strict=True):
            trust.begin(sequence.stats)
        return replace(shape, rounds=most if any(trust.proved for trust in trusts) else min(most, cost.trial_rounds))

    def select(self, trees: Mapping[Sequence, TokenTree], plans: Mapping[Sequence, Plan]) -> dict[Sequence, TokenTree]:
        """The planned number of nodes, by confidence. A sampled tree with more nodes than that is a fault."""
        return {s: tree.limited(plans[s].depth, plans[s].nodes) for s, tree in trees.items()}

    def drafted(self, ms: float) -> None:
        """Do nothing: a fixed policy does not use times."""

    def observe(self, report: Report) -> None:
        """Do nothing: a fixed policy learns nothing."""
