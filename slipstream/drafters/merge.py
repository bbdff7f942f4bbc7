"""`merge`: the trees of several drafters as one (SpecInfer), written `suffix+draft_model:model=PATH`.

Guesses that begin alike share their nodes; what one drafter does not know another may. If the union has more nodes than
the plan, the most confident ones ride. Merging looks at tokens, so only chosen nodes can be merged: a drafter that
samples its nodes for a verifier that reads q is refused.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, Outcome, Wish
from slipstream.drafters.device_draft import DeviceDraft
from slipstream.drafters.registry import DrafterSpec, build_several
from slipstream.drafters.repeat_loop import RepeatDraft
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.tree_loop import TreeDraft
from slipstream.errors import OptionError
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class MergeOptions(DraftOptions):
    """`drafters`: two or more. Each keeps its own options; `depth` and `nodes` bound the merged tree (0: no more than
    the drafters' own bounds, 192 nodes at most).
    """

    depth: int = 0
    nodes: int = 0
    drafters: tuple[DrafterSpec, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unset in (("branch", 2), ("min_confidence", 0.0)):
            self.require(getattr(self, name) == unset, name, "an option of each of the merged drafters")
        if len(self.drafters) < 2:
            raise OptionError("merge needs two drafters or more", hint="suffix+draft_model:model=PATH")

    @property
    def plan(self) -> Plan:
        """As deep as the deepest of the drafters, and with the nodes of all of them."""
        plans = [spec.checked().plan for spec in self.drafters]
        depth = self.depth or max(plan.depth for plan in plans)
        return Plan(depth, self.nodes or min(192, sum(plan.nodes for plan in plans)))


class MergeDrafter(Drafter[MergeOptions]):
    """Draft with several drafters at once."""

    name = "merge"
    summary = "several drafters at once, their trees merged into one"
    helps = "drafters that know different things, such as repetition and a model; the pass must have rows to spare"
    cost = "that of all its drafters, one after the other"
    needs = "two drafters or more, none of which samples its nodes"
    options_type = MergeOptions

    def __init__(self, options: MergeOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self.drafters = build_several(options.drafters, target)
        for drafter in self.drafters:
            if drafter.samples:
                raise OptionError(
                    f"{drafter.name} samples its nodes for this verifier, and sampled nodes cannot be merged: which of "
                    "them stand would depend on the tokens of others, and the output would no longer be the target's",
                    hint="the verifier `match`, or draw=top for a drafter that has this option",
                )
        self._plans = [drafter.plan for drafter in self.drafters]
        self.taps = tuple(sorted({layer for drafter in self.drafters for layer in drafter.taps}))

    @property
    def plan(self) -> Plan:
        """As the options say it, with what the drafters themselves do on this device where they leave it open."""
        plan, options = self.options.plan, self.options
        return Plan(plan.depth, options.nodes or min(192, sum(part.nodes for part in self._plans)))

    def rename(self, key: str) -> None:
        super().rename(key)
        for drafter in self.drafters:
            drafter.rename(f"{key}/{drafter.key}")

    @property
    def origins(self) -> frozenset[str]:
        # Rounds on the device do not tell the drafters apart: what is accepted there is the merge's own.
        return frozenset({self.name}).union(*(drafter.origins for drafter in self.drafters))

    def attach(self, cache: PagedCache) -> None:
        for drafter in self.drafters:
            drafter.attach(cache)

    def scratch_rows(self, plan: Plan) -> int:
        pairs = zip(self.drafters, self._plans, strict=True)
        return max(drafter.scratch_rows(_within(own, plan)) for drafter, own in pairs)

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        merged = [TokenTree(wish.sequence.tokens[-1]) for wish in wishes]
        for drafter, own in zip(self.drafters, self._plans, strict=True):
            asking = [
                (tree, Wish(wish.sequence, plan))
                for tree, wish in zip(merged, wishes, strict=True)
                if (plan := _within(own, wish.plan)).drafts
            ]
            if not asking:
                continue
            offers = drafter.propose([wish for _, wish in asking])
            for (tree, wish), offer in zip(asking, offers, strict=True):
                tree.merge(offer.cut(wish.plan.depth))
        return merged

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        """`suffix` beside one drafter that grows trees there. Any other merge is made by the host."""
        own = [drafter for drafter in self.drafters if isinstance(drafter, SuffixDrafter)]
        others = [drafter for drafter in self.drafters if drafter not in own]
        if len(own) != 1 or len(others) != 1 or own[0].remembers_others:
            return None
        trees = others[0].device_draft(lanes)
        if not isinstance(trees, TreeDraft) or not own[0].plan.drafts:
            return None
        depth, nodes = max(trees.plan.depth, own[0].plan.depth), trees.plan.nodes
        bound = Plan(self.options.depth or depth, self.options.nodes or nodes)
        chain = _within(own[0].plan, bound)
        joined = trees.joined(_within(trees.plan, bound), min(chain.depth, chain.nodes))
        return RepeatDraft(joined, own[0].options.min_match)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for drafter in self.drafters:
            drafter.observe([_seen_by(drafter, outcome) for outcome in outcomes])

    def depart(self, outcome: Outcome) -> None:
        for drafter in self.drafters:
            drafter.depart(_seen_by(drafter, outcome))

    def rollback(self, sequence: Sequence, length: int) -> None:
        for drafter in self.drafters:
            drafter.rollback(sequence, length)

    def close(self, sequence: Sequence) -> None:
        for drafter in self.drafters:
            drafter.close(sequence)


def _within(own: Plan, plan: Plan) -> Plan:
    """What one drafter is asked for: its own plan within the plan for all."""
    return replace(own, depth=min(own.depth, plan.depth), nodes=min(own.nodes, plan.nodes)) if plan.drafts else plan


def _seen_by(drafter: Drafter[DraftOptions], outcome: Outcome) -> Outcome:
    """The taps that this drafter named, and no others."""
    taps: dict[int, torch.Tensor] = {layer: outcome.taps[layer] for layer in drafter.taps if layer in outcome.taps}
    return replace(outcome, taps=taps)
