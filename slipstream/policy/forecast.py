"""The expected cost and accepted tokens of a burst of one shape: measured, or estimated from other shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream.policy.costs import DraftCosts, PassCosts
from slipstream.policy.record import Context, Record, Way
from slipstream.policy.report import Report
from slipstream.policy.tally import Tally, left_to_smaller
from slipstream.types import Plan

# Guesses in plain rounds: the draft of a model, that of a chain, a step of the host, a token that is read late.
_MODEL, _CHAIN, _HOST, _READ = 0.3, 0.02, 1.5, 0.01
_LEVELS = 6.0  # doublings of the tree with which a model brings what `Record` guesses
_HOST_CALLS = "host"


class RoundWay(NamedTuple):
    """One way to run the next burst: with trees, plainly, or by steps of the host."""

    plan: Plan = Plan()  # the shape
    drafters: Way = ()  # labels
    model: bool = False  # whether any of them has no signal
    by_host: bool = False

    @property
    def key(self) -> Way:
        """The key of this way in the record."""
        if self.by_host:
            return (_HOST_CALLS, *self.drafters)
        return (*self.drafters, str(self.plan.nodes)) if self.drafters else ()

    @property
    def label(self) -> str:
        """The label under which its costs are kept."""
        return "/".join(self.key)


class Forecast:
    """Costs of rounds by shape and batch, and accepted tokens by shape and context."""

    def __init__(self, costs: PassCosts) -> None:
        self.passes = costs
        self.drafts = DraftCosts()
        self.record = Record()
        self._tallies: dict[Way, Tally] = {}  # by key

    # -- milliseconds at the pace of `passes` -------------------------------------------------------------------------

    def ms(self, way: RoundWay, count: int, context: int) -> float:
        """Milliseconds of one round of `count` sequences with `context` tokens each."""
        curve = self.passes.curve(count, context)
        if way.by_host:
            return self.drafts.call(way.label, count, _HOST * curve[count])
        if not way.drafters:
            return curve[count]
        guess = _MODEL if way.model else _CHAIN
        return curve[count * (1 + way.plan.nodes)] + self.drafts.call(way.label, count, guess * curve[count])

    def catch_up_ms(self, way: RoundWay, count: int, context: int, unread: int) -> float:
        """Milliseconds to read `unread` tokens before the first round."""
        return self.drafts.catch_up(_read(way), unread, _READ * self.passes.curve(count, context)[count])

    def knows(self, way: RoundWay) -> bool:
        """Whether rounds with these drafts were measured."""
        return not way.drafters or self.drafts.call(way.label, 1, -1.0) >= 0.0

    # -- accepted tokens ----------------------------------------------------------------------------------------------

    def accepted(self, way: RoundWay, context: Context) -> float:
        """Expected accepted tokens per round and sequence."""
        if not way.drafters:
            return 0.0
        if way.by_host or self.record.knows(way.key, context):
            return self.record.mean(way.key, context, model=way.model)[0]
        others = [key for key in self.record.ways() if key[:-1] == way.drafters and self.record.knows(key, context)]
        size = 1 + way.plan.nodes
        if not others:
            share = min(1.0, math.log2(size) / _LEVELS) if way.model else 1.0
            return share * self.record.mean(way.key, context, model=way.model)[0]
        other = min(others, key=lambda key: abs(math.log(size / (1 + int(key[-1])))))
        known, theirs = self.record.mean(other, context, model=way.model)[0], 1 + int(other[-1])
        if theirs > size and other in self._tallies:
            return known * left_to_smaller(self._tallies[other], way.plan.depth, size / theirs)
        return known * math.log2(size) / math.log2(theirs)

    # -- from reports -------------------------------------------------------------------------------------------------

    def add_burst(self, way: RoundWay, count: int, context: int, rounds: int, report: Report) -> None:
        """Add a burst that ran without compiling or capturing anything."""
        rows = count * (1 + way.plan.nodes)
        self.passes.add(count, context, rows, report.verify_ms / rounds)
        pace = self.passes.pace
        if way.drafters:
            self.drafts.add(way.label, count, way.plan.depth, report.draft_ms / rounds / pace)
        for call in report.calls:
            if call.read > way.plan.depth:
                self.drafts.add_catch_up(_read(way), call.read, call.ms / pace)

    def add_host(self, way: RoundWay, count: int, report: Report) -> None:
        """Add a step of the host."""
        self.drafts.add(way.label, count, 0, (report.draft_ms + report.verify_ms) / self.passes.pace)

    def add_tally(self, way: RoundWay, tally: Tally) -> None:
        """Add the counts that the device kept in a burst."""
        if way.drafters:
            known = self._tallies.setdefault(way.key, Tally())
            known.add(tally)
            known.age()

    # -- between runs -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data for a file. Tallies are not kept: what was measured is in the record."""
        return {
            "passes": self.passes.state(),
            "drafts": self.drafts.state(self.passes.pace),
            "record": self.record.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what `state` gave; costs are absent if they are those of another machine."""
        if "passes" in state:
            self.passes.restore(state["passes"])
            self.drafts.restore(state["drafts"])
        self.record.restore(state["record"])


def _read(way: RoundWay) -> str:
    """The label of the cost of reading late, which does not depend on the tree."""
    return "/".join(way.drafters)
