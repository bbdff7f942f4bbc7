"""`auto`: the drafters at hand, of which the policy picks some, or none, in every step.

Its plan has a plan for each part, made by the policy from what it has measured. A part that fails on a request is
dropped for that request; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.drafters.base import DraftOptions, DraftRequest, Outcome
from slipstream.drafters.composite import CompositeDrafter, seen_by
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.guard.faults import proposals, tell
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.registry import AnyDrafter, DrafterSpec
from slipstream.policy.report import DraftCall
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Limits, Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

log = logging.getLogger("slipstream")

_OBJECTIVES = ("latency", "throughput")
_HEADS = ("eagle3", "parallel", "mtp", "medusa", "kangaroo")  # the first that was trained for the target is used


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
    max_depth: int = 16
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
    """Draft with what the policy picks."""

    name = "auto"
    summary = "the drafters at hand: the policy picks some of them, or none, in every step"
    helps = "any text: it drafts where that pays, and decodes plainly where it does not"
    cost = "that of the drafters it picks; trying the others takes at most 1% of the time"
    options_type = AutoOptions

    def __init__(self, options: AutoOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self._build(options.drafters or at_hand(target, options.model), target)
        self.parts = _labelled(self.drafters)
        self.limits = options.limits
        self.exclusive = any(drafter.samples for drafter in self.drafters)  # sampled trees cannot be merged
        self.part_faults = Counter()
        self._calls: list[DraftCall] = []

    def take_calls(self) -> list[DraftCall]:
        """The calls of its parts since the last time."""
        calls, self._calls = self._calls, []
        return calls

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
            self._calls.append(DraftCall(label, len(asking), levels, ms, read))
        return [t or TokenTree(w.sequence.tokens[-1]) for t, w in zip(trees, requests, strict=True)]

    def _merged(
        self, tree: TokenTree | None, offer: TokenTree, request: DraftRequest, label: str, drafter: AnyDrafter
    ) -> TokenTree | None:
        """The trees so far with one more. It is checked first: a fault in it is its drafter's alone."""
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

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        """As `merge` does, or as its only drafter does."""
        if len(self.on_device) == 1:
            return self.on_device[0].device_draft(lanes)
        return self._device_draft(lanes, Plan(0, 0))

    # -- a part that fails is dropped for the request -----------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for label, drafter in self.parts.items():
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


def at_hand(target: TargetView, model: str = "") -> list[DrafterSpec]:
    """What can draft for a target without being named: `suffix`, what a request brings (a grammar, a prediction), and
    the best kind of head that was trained for it.
    """
    specs = [DrafterSpec("suffix"), DrafterSpec("grammar"), DrafterSpec("prediction")]
    if target.layered:
        found = (name for name in _HEADS if head_checkpoint.find(name, target.fingerprint) is not None)
        specs += [DrafterSpec(name) for name in [next(found, None)] if name is not None]
    return [*specs, DrafterSpec("draft_model", {"model": model})] if model else specs


def _labelled(drafters: Seq[AnyDrafter]) -> dict[str, AnyDrafter]:
    """Drafters by name; if there are several of one name, they are numbered."""
    names = Counter(drafter.name for drafter in drafters)
    return {d.name if names[d.name] == 1 else f"{d.name}.{i}": d for i, d in enumerate(drafters)}
