"""Drafters made of several drafters: what `merge` and `auto` share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, Outcome
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.device.repeat_loop import RepeatDraft
from slipstream.drafters.device.tree_loop import TreeDraft
from slipstream.drafters.registry import AnyDrafter, DrafterSpec, build_several
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.sequence import Sequence
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

Options = TypeVar("Options", bound=DraftOptions)


class CompositeDrafter(Drafter[Options], Generic[Options]):
    """Several drafters, whose trees become one tree."""

    drafters: list[AnyDrafter]

    def _build(self, specs: Seq[DrafterSpec], target: TargetView) -> None:
        self.drafters = build_several(specs, target)
        self.taps = tuple(sorted({layer for drafter in self.drafters for layer in drafter.taps}))

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

    @property
    def on_device(self) -> list[AnyDrafter]:
        """The drafters that need nothing from the request: only these draft in device rounds (`host_only`)."""
        return [drafter for drafter in self.drafters if not drafter.by_request]

    def host_only(self, sequence: Sequence) -> bool:
        return any(drafter.host_only(sequence) for drafter in self.drafters)

    def _device_draft(self, lanes: int, limits: Plan) -> DeviceDraft | None:
        """`suffix` with one drafter that grows trees on the device. Anything else runs on the host, as do requests
        that bring something to draft from.

        `limits`: depth and nodes at most, where they are not 0.
        """
        own = [drafter for drafter in self.on_device if isinstance(drafter, SuffixDrafter)]
        others = [drafter for drafter in self.on_device if drafter not in own]
        if len(own) != 1 or len(others) != 1 or not own[0].fits_a_device:
            return None
        trees = others[0].device_draft(lanes)
        if not isinstance(trees, TreeDraft):
            return None
        depth, nodes = max(trees.plan.depth, own[0].plan.depth), trees.plan.nodes
        bound = Plan(limits.depth or depth, limits.nodes or nodes)
        chain = within(own[0].plan, bound)
        joined = trees.joined(within(trees.plan, bound), min(chain.depth, chain.nodes))
        return RepeatDraft(joined, own[0].name, own[0].options.min_match)

    @cached_property
    def extending(self) -> list[AnyDrafter]:
        """The drafters that continue the trees of others."""
        return [drafter for drafter in self.drafters if getattr(type(drafter), "extend", None) is not Drafter.extend]

    @cached_property
    def observing(self) -> list[AnyDrafter]:
        """The drafters that learn from outcomes: the others are not called in every step."""
        return [drafter for drafter in self.drafters if getattr(type(drafter), "observe", None) is not Drafter.observe]

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for drafter in self.observing:
            drafter.observe([seen_by(drafter, outcome) for outcome in outcomes])

    def depart(self, outcome: Outcome) -> None:
        for drafter in self.drafters:
            drafter.depart(seen_by(drafter, outcome))

    def rollback(self, sequence: Sequence, length: int) -> None:
        for drafter in self.drafters:
            drafter.rollback(sequence, length)

    def close(self, sequence: Sequence) -> None:
        for drafter in self.drafters:
            drafter.close(sequence)


def within(own: Plan, plan: Plan) -> Plan:
    """The plan of one drafter: its own plan within the plan for all."""
    return replace(own, depth=min(own.depth, plan.depth), nodes=min(own.nodes, plan.nodes)) if plan.drafts else plan


def seen_by(drafter: Drafter[DraftOptions], outcome: Outcome) -> Outcome:
    """The outcome with only the taps that this drafter named."""
    if len(drafter.taps) == len(outcome.taps):
        return outcome
    taps: dict[int, torch.Tensor] = {layer: outcome.taps[layer] for layer in drafter.taps if layer in outcome.taps}
    return replace(outcome, taps=taps)
