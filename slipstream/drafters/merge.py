"""`merge`: the trees of several drafters as one (SpecInfer), written `suffix+draft_model:model=PATH`.

Common prefixes share nodes. If the union has more nodes than the plan, the most confident ones are kept. Merging looks
at tokens, so only chosen nodes can be merged: a drafter that samples its nodes for a verifier that reads q is refused.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest, Outcome
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.device.repeat_loop import RepeatDraft
from slipstream.drafters.device.tree_loop import TreeDraft
from slipstream.drafters.registry import DrafterSpec, build_several
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.errors import OptionError
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class MergeOptions(DraftOptions):
    """`drafters`: two or more. Each keeps its own options; `depth` and `nodes` bound the merged tree (0: the
    drafters' own bounds, 192 nodes at most).
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
        """As deep as the deepest drafter, with the nodes of all of them."""
        plans = [spec.checked().plan for spec in self.drafters]
        depth = self.depth or max(plan.depth for plan in plans)
        return Plan(depth, self.nodes or min(192, sum(plan.nodes for plan in plans)))


class MergeDrafter(Drafter[MergeOptions]):
    """Draft with several drafters at once."""

    name = "merge"
    summary = "several drafters at once, their trees merged into one"
    helps = "drafters with different strengths, such as repetition and a model; the pass must have rows to spare"
    cost = "the sum of its drafters' costs"
    needs = "two or more drafters, none of which samples its nodes"
    options_type = MergeOptions

    def __init__(self, options: MergeOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self.drafters = build_several(options.drafters, target)
        for drafter in self.drafters:
            if drafter.samples:
                raise OptionError(
                    f"{drafter.name} samples its nodes for this verifier, and sampled nodes cannot be merged: which of "
                    "them are kept would depend on other tokens, and the output would no longer follow the target",
                    hint="the verifier `match`, or draw=top for a drafter that has this option",
                )
        self._plans = [drafter.plan for drafter in self.drafters]
        self.taps = tuple(sorted({layer for drafter in self.drafters for layer in drafter.taps}))

    @property
    def plan(self) -> Plan:
        """The options' bounds, or the drafters' own on this device where the options leave them open."""
        plan, options = self.options.plan, self.options
        return Plan(plan.depth, options.nodes or min(192, sum(part.nodes for part in self._plans)))

    def rename(self, key: str) -> None:
        super().rename(key)
        for drafter in self.drafters:
            drafter.rename(f"{key}/{drafter.key}")

    @property
    def origins(self) -> frozenset[str]:
        return frozenset[str]().union(*(drafter.origins for drafter in self.drafters))

    def attach(self, cache: PagedCache) -> None:
        for drafter in self.drafters:
            drafter.attach(cache)
        self.stores_needed = tuple(store for drafter in self.drafters for store in drafter.stores_needed)

    def scratch_rows(self, plan: Plan) -> int:
        pairs = zip(self.drafters, self._plans, strict=True)
        return max(drafter.scratch_rows(_within(own, plan)) for drafter, own in pairs)

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        merged: list[TokenTree | None] = [None] * len(requests)
        for drafter, own in zip(self.drafters, self._plans, strict=True):
            plans = [_within(own, request.plan) for request in requests]
            asking = [number for number, plan in enumerate(plans) if plan.drafts]
            if not asking:
                continue
            offers = drafter.propose([DraftRequest(requests[number].sequence, plans[number]) for number in asking])
            for number, offer in zip(asking, offers, strict=True):
                offer, tree = offer.cut(plans[number].depth), merged[number]
                if tree is None:  # the others are merged into the first tree
                    offer.prepared, merged[number] = None, offer
                else:
                    tree.merge(offer)
        return [t or TokenTree(w.sequence.tokens[-1]) for t, w in zip(merged, requests, strict=True)]

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        """`suffix` with one drafter that grows trees on the device. Any other merge runs on the host."""
        own = [drafter for drafter in self.drafters if isinstance(drafter, SuffixDrafter)]
        others = [drafter for drafter in self.drafters if drafter not in own]
        if len(own) != 1 or len(others) != 1 or not own[0].fits_a_device:
            return None
        trees = others[0].device_draft(lanes)
        if not isinstance(trees, TreeDraft):
            return None
        depth, nodes = max(trees.plan.depth, own[0].plan.depth), trees.plan.nodes
        bound = Plan(self.options.depth or depth, self.options.nodes or nodes)
        chain = _within(own[0].plan, bound)
        joined = trees.joined(_within(trees.plan, bound), min(chain.depth, chain.nodes))
        return RepeatDraft(joined, own[0].name, own[0].options.min_match)

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
    """The plan of one drafter: its own plan within the plan for all."""
    return replace(own, depth=min(own.depth, plan.depth), nodes=min(own.nodes, plan.nodes)) if plan.drafts else plan


def _seen_by(drafter: Drafter[DraftOptions], outcome: Outcome) -> Outcome:
    """The outcome with only the taps that this drafter named."""
    taps: dict[int, torch.Tensor] = {layer: outcome.taps[layer] for layer in drafter.taps if layer in outcome.taps}
    return replace(outcome, taps=taps)
