"""`auto`: the available drafters, of which the policy picks some, or none, in every step.

Its plan has a plan for each part, made by the policy from what it has measured. A part that fails on a request is
dropped for that request; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING

from slipstream.drafters.base import DraftOptions, DraftRequest, Outcome
from slipstream.drafters.composites.composite import CompositeDrafter, seen_by, within
from slipstream.drafters.device.chain_loop import ChainDraft
from slipstream.drafters.device.device_draft import DeviceDraft, DeviceKeeper
from slipstream.drafters.device.repeat_loop import RepeatDraft
from slipstream.drafters.device.tree_loop import TreeDraft
from slipstream.drafters.guard.faults import proposals, tell
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.registry import AnyDrafter, DrafterSpec
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.gpu.lanes import Lanes
from slipstream.policy.report import DraftCall
from slipstream.policy.sizes import LEAST_CHAIN, most_nodes, round_trees
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Limits, Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

log = logging.getLogger("slipstream")

_OBJECTIVES = ("latency", "throughput")
# Of a draft model on a CPU: levels are grown while they promise enough, and a few rows more cost little.
_DRAFT_ON_CPU: dict[str, object] = {"depth": 8, "branch": 3}
HEADS = ("eagle3", "parallel", "mtp", "medusa", "kangaroo")  # the first that was trained for the target is used


@dataclass(frozen=True)
class AutoOptions(DraftOptions):
    """`drafters`: the drafters to pick from (default: suffix, grammar, prediction, and a head that was trained for the
    target). `model`: a smaller model of the same vocabulary to pick from, too. `max_nodes`, `max_depth`: limits of a
    tree. `objective`: `latency` (the mean speed of requests) or `throughput` (tokens of all). `max_tpot_ms`: no draft
    that would make a token take longer (0: no bound). `clock`: `no` decides from saved costs and the request's own
    counts alone, so that the same request is decided in the same way again.
    """

    depth: int = 0
    nodes: int = 0
    drafters: tuple[DrafterSpec, ...] = ()
    model: str = ""
    max_nodes: int = 64
    max_depth: int = 64
    objective: str = "latency"
    max_tpot_ms: float = 0.0
    clock: bool = True

    def __post_init__(self) -> None:
        for name, unset in (("depth", 0), ("nodes", 0), ("branch", 2), ("min_confidence", 0.0)):
            self.require(getattr(self, name) == unset, name, "an option of a fixed drafter; limits are max_nodes, ...")
        self.require(0 <= self.max_nodes <= 192, "max_nodes", "0 to 192")
        self.require(0 <= self.max_depth <= 64, "max_depth", "0 to 64")
        self.require(self.objective in _OBJECTIVES, "objective", ", ".join(_OBJECTIVES))
        self.require(self.max_tpot_ms >= 0.0, "max_tpot_ms", "0 (no bound) or more")

    @property
    def plan(self) -> Plan:
        """The largest tree."""
        return Plan(self.max_depth, self.max_nodes)

    @property
    def limits(self) -> Limits:
        """What the policy must keep to."""
        named = frozenset(spec.method for spec in self.drafters) or None
        return Limits(named, self.max_nodes, self.max_depth, self.objective, self.max_tpot_ms, self.clock)


class AutoDrafter(CompositeDrafter[AutoOptions]):
    """Draft with the drafters that the policy picks."""

    name = "auto"
    summary = "the available drafters: the policy picks some of them, or none, in every step"
    helps = "any text: it drafts where that pays, and decodes plainly where it does not"
    cost = "that of the drafters it picks; trying the others takes at most 1% of the time"
    options_type = AutoOptions

    def __init__(self, options: AutoOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self._build(options.drafters or available(target, options.model), target)
        self.parts = _labelled(self.drafters)
        self.limits = options.limits
        self.exclusive = any(drafter.samples for drafter in self.drafters)  # sampled trees cannot be merged
        self.part_faults = Counter()
        self._calls: list[DraftCall] = []

    def take_calls(self) -> list[DraftCall]:
        """The calls of the parts since the last `take_calls`."""
        calls, self._calls = self._calls, []
        return calls

    def lighter(self) -> AutoDrafter | None:
        """The same drafter without the head that was found for the target."""
        specs = available(self.target, self.options.model, heads=False)
        if self.options.drafters or len(specs) == len(self.drafters):
            return None
        found = AutoDrafter(replace(self.options, drafters=tuple(specs)), self.target)
        if found.key != self.key:
            found.rename(self.key)
        return found

    def scratch_rows(self, plan: Plan) -> int:
        return max((d.scratch_rows(own) for d, own in zip(self.drafters, plan.parts, strict=True)), default=0)

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        trees: list[TokenTree | None] = [None] * len(requests)
        for place, (label, drafter) in enumerate(self.parts.items()):
            asking = [number for number, request in enumerate(requests) if request.plan.parts[place].drafts]
            if not asking:
                continue
            asked = [DraftRequest(requests[number].sequence, requests[number].plan.parts[place]) for number in asking]
            read = max(drafter.unread(request.sequence) for request in asked)
            began = time.perf_counter()
            offers = proposals(drafter, asked, self._drop(label, drafter))
            ms, levels = 1000 * (time.perf_counter() - began), 0
            for number, offer in zip(asking, offers, strict=True):
                if offer is None:
                    continue
                levels = max(levels, offer.depth)
                trees[number] = self._merged(trees[number], offer, requests[number], label, drafter)
            short = max(request.plan.depth for request in asked) == 1
            self._calls.append(DraftCall(label, len(asking), levels, ms, read, short))
        for request, tree in zip(requests, trees, strict=True):
            if tree is not None and not tree.sampled:
                self._extend(request, tree)
        return [t or TokenTree(w.sequence.tokens[-1]) for t, w in zip(trees, requests, strict=True)]

    def _merged(
        self, tree: TokenTree | None, offer: TokenTree, request: DraftRequest, label: str, drafter: AnyDrafter
    ) -> TokenTree | None:
        """Merge one more tree into those so far. It is checked first: a fault in it drops only its own drafter."""
        sequence = request.sequence
        try:
            offer.check(sequence.tokens[-1], self.target.config.vocab_size)
            if tree is None:
                return offer
            tree.prepared = None
            tree.merge(offer)
        except Exception as error:
            self._drop(label, drafter)(sequence, error)
        return tree

    def _extend(self, request: DraftRequest, tree: TokenTree) -> None:
        """Let other parts continue a tree: those that the request may use, whether they were asked or not."""
        sequence = request.sequence
        named, before = (sequence.limits or self.limits).drafters, len(tree)
        for label, drafter in self.parts.items():
            able = drafter in self.extending and drafter.key not in sequence.dropped
            if able and (named is None or drafter.name in named):
                try:
                    drafter.extend(request, tree)
                except Exception as error:
                    self._drop(label, drafter)(sequence, error)
        if len(tree) > before:
            tree.prepared = None

    # -- in rounds ----------------------------------------------------------------------------------------------------

    def device_drafts(self, lanes: int) -> dict[tuple[Plan, ...], DeviceDraft]:
        """Trees of several sizes for each drafter that grows trees, joined by chains of `suffix`; and chains alone."""
        found: dict[tuple[Plan, ...], DeviceDraft] = {}
        suffix = next((d for d in self.on_device if isinstance(d, SuffixDrafter) and d.fits_a_device), None)
        chain = Plan() if suffix is None else self._chain(suffix.plan, lanes)
        for drafter in self.on_device:
            alone = drafter.device_draft(1)
            if isinstance(alone, TreeDraft):
                for plan in round_trees(within(alone.plan, self.plan), lanes, fixed_depth="depth" in drafter.given):
                    length = min(chain.nodes, plan.nodes)
                    trees = alone.joined(plan, length)
                    if suffix is None or not length:
                        found[self._placed({drafter: plan})] = trees
                    else:
                        parts = {drafter: plan, suffix: replace(chain, depth=length, nodes=length)}
                        found[self._placed(parts)] = RepeatDraft(trees, suffix.name, suffix.options.min_match)
            elif alone is not None and drafter is not suffix and self._fits(alone, lanes):
                found[self._placed({drafter: Plan(alone.depth, alone.nodes)})] = alone
        if suffix is not None and chain.nodes >= min(LEAST_CHAIN, suffix.plan.nodes):
            found[self._placed({suffix: chain})] = ChainDraft(suffix, chain.nodes)
        return found

    def _chain(self, own: Plan, lanes: int) -> Plan:
        """The plan of the chains of `suffix` in rounds."""
        plan = within(own, self.plan)
        length = min(plan.depth, plan.nodes, most_nodes(lanes))
        return Plan(length, length)

    def _fits(self, draft: DeviceDraft, lanes: int) -> bool:
        """Whether a tree of one shape is within the limits."""
        return draft.nodes <= min(self.plan.nodes, most_nodes(lanes)) and draft.depth <= self.plan.depth

    def _placed(self, plans: Mapping[AnyDrafter, Plan]) -> tuple[Plan, ...]:
        """The plans of all parts, in order."""
        return tuple(plans.get(drafter, Plan()) for drafter in self.drafters)

    def device_keepers(self, lanes: Lanes, drafting: Seq[Plan] = ()) -> list[DeviceKeeper]:
        resting = [d for d, own in zip_longest(self.drafters, drafting) if own is None or not own.drafts]
        return [keeper for drafter in resting for keeper in drafter.device_keepers(lanes)]

    @cached_property
    def off_device(self) -> tuple[str, ...]:
        """The labels of drafters that can draft only on the host, for any request."""
        known = self.on_device
        return tuple(label for label, d in self.parts.items() if d in known and d.device_draft(1) is None)

    # -- a part that fails is dropped for the request -----------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for label, drafter in self.parts.items():
            if drafter not in self.observing:
                continue
            seen = [seen_by(drafter, outcome) for outcome in outcomes if drafter.key not in outcome.sequence.dropped]
            tell(drafter, seen, self._drop(label, drafter))

    def depart(self, outcome: Outcome) -> None:
        for label, drafter in self.parts.items():
            try:
                drafter.depart(seen_by(drafter, outcome))
            except Exception as error:
                self._drop(label, drafter)(outcome.sequence, error)

    def close(self, sequence: Sequence) -> None:
        for label, drafter in self.parts.items():
            try:
                drafter.close(sequence)
            except Exception as error:
                self._drop(label, drafter)(sequence, error)

    def _drop(self, label: str, drafter: AnyDrafter) -> _Drop:
        return _Drop(self, label, drafter.key)


@dataclass(frozen=True)
class _Drop:
    """Drops one part for a sequence."""

    auto: AutoDrafter
    label: str
    key: str

    def __call__(self, sequence: Sequence, error: Exception) -> None:
        sequence.dropped.add(self.key)
        sequence.stats.draft_faults += 1
        self.auto.part_faults[self.label] += 1
        log.warning("drafter %r failed on request %s and is dropped for it: %s", self.label, sequence.request.id, error)


def available(target: TargetView, model: str = "", *, heads: bool = True) -> list[DrafterSpec]:
    """What can draft for a target without being named: `suffix`, what a request brings (a grammar, a prediction), and
    with `heads` the best kind of head that was trained for it.
    """
    specs = [DrafterSpec("suffix"), DrafterSpec("grammar"), DrafterSpec("prediction")]
    if target.layered and heads:
        found = (name for name in HEADS if head_checkpoint.find(name, target.fingerprint) is not None)
        specs += [DrafterSpec(name) for name in [next(found, None)] if name is not None]
    if model:
        specs.append(DrafterSpec("draft_model", {"model": model, **(_DRAFT_ON_CPU if target.device == "cpu" else {})}))
    return specs


def _labelled(drafters: Seq[AnyDrafter]) -> dict[str, AnyDrafter]:
    """Drafters by name; if there are several of one name, they are numbered."""
    names = Counter(drafter.name for drafter in drafters)
    return {d.name if names[d.name] == 1 else f"{d.name}.{i}": d for i, d in enumerate(drafters)}
