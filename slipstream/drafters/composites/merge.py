"""`merge`: the trees of several drafters as one (SpecInfer), written `suffix+draft_model:model=PATH`.

Common prefixes share nodes. If the union has more nodes than the plan, the most confident ones are kept. Merging looks
at tokens, so only chosen nodes can be merged: a drafter that samples its nodes for a verifier that reads q is refused.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.drafters.base import DraftOptions, DraftRequest
from slipstream.drafters.composites.composite import CompositeDrafter, within
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.registry import DrafterSpec
from slipstream.errors import OptionError
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


class MergeDrafter(CompositeDrafter[MergeOptions]):
    """Draft with several drafters at once."""

    name = "merge"
    summary = "several drafters at once, their trees merged into one"
    helps = "drafters with different strengths, such as repetition and a model; the pass must have rows to spare"
    cost = "the sum of its drafters' costs"
    needs = "two or more drafters, none of which samples its nodes"
    options_type = MergeOptions

    def __init__(self, options: MergeOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self._build(options.drafters, target)
        for drafter in self.drafters:
            if drafter.samples:
                raise OptionError(
                    f"{drafter.name} samples its nodes for this verifier, and sampled nodes cannot be merged: which of "
                    "them are kept would depend on other tokens, and the output would no longer follow the target",
                    hint="the verifier `match`, or draw=top for a drafter that has this option",
                )
        self._plans = [drafter.plan for drafter in self.drafters]

    @property
    def plan(self) -> Plan:
        """The options' bounds, or the drafters' own on this device where the options leave them open."""
        plan, options = self.options.plan, self.options
        return Plan(plan.depth, options.nodes or min(192, sum(part.nodes for part in self._plans)))

    def scratch_rows(self, plan: Plan) -> int:
        pairs = zip(self.drafters, self._plans, strict=True)
        return max(drafter.scratch_rows(within(own, plan)) for drafter, own in pairs)

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        merged: list[TokenTree | None] = [None] * len(requests)
        for drafter, own in zip(self.drafters, self._plans, strict=True):
            plans = [within(own, request.plan) for request in requests]
            asking = [number for number, plan in enumerate(plans) if plan.drafts]
            if not asking:
                continue
            offers = drafter.propose([DraftRequest(requests[number].sequence, plans[number]) for number in asking])
            for number, offer in zip(asking, offers, strict=True):
                offer, tree = offer.truncated(plans[number].depth), merged[number]
                if tree is None:  # the others are merged into the first tree
                    offer.prepared, merged[number] = None, offer
                else:
                    tree.merge(offer)
        for request, tree in zip(requests, merged, strict=True):
            if tree is not None:
                for drafter in self.extending:
                    drafter.extend(request, tree)
        return [t or TokenTree(w.sequence.tokens[-1]) for t, w in zip(merged, requests, strict=True)]

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        return self._device_draft(lanes, Plan(self.options.depth, self.options.nodes))
