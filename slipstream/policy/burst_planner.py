"""How bursts of rounds are planned on a device: one shape of trees for the whole batch, or none.

The measure is that of the host's steps, tokens per millisecond. Rounds have a few shapes, which are captured
beforehand; what each costs and brings is in `forecast`. A burst is planned while its first round may run already,
started ahead in the shape of the burst before. If the shape changes, that round is the only one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from slipstream.policy import sizes
from slipstream.policy.base import Drafts, Rounds
from slipstream.policy.calibration import Calibration, Tilt, temperature_class
from slipstream.policy.choice import MIN_GAIN, STICKY, Choice, Estimate, choose_one
from slipstream.policy.costs import PassCosts
from slipstream.policy.forecast import Forecast, RoundWay
from slipstream.policy.probes import Probes
from slipstream.policy.record import Context, Way, match_class, size_class
from slipstream.policy.report import Progress, Report
from slipstream.sequence import Sequence
from slipstream.types import Decision, Limits, Plan

_TILTS = "policy.burst_planner"  # key in `Sequence.drafting`: by drafters
_TRIAL_ROUNDS, _TRIAL_STEPS = 2, 4  # of a shape that is tried; steps of the host
_CAUGHT_UP = 16  # tokens that a drafter reads in a round
_PAYBACK = 64  # tokens over which reading late is paid back
_PLAIN = RoundWay()


class _Promise(NamedTuple):
    """What one way promises the whole batch in a round."""

    way: RoundWay
    offer: list[Estimate]  # by sequence
    ms: float

    @property
    def tokens(self) -> float:
        """The expected tokens of all sequences in a round."""
        return len(self.offer) + sum(pick.accepted for pick in self.offer)


@dataclass
class _Planned:
    """The last plan."""

    sequences: list[Sequence]
    promise: _Promise
    plan: Plan
    probe: bool
    promises: dict[tuple[Plan, ...], _Promise]  # by the shape that is reported
    matched: list[int]
    pace: float  # milliseconds per token of the chosen way
    asked: int = 1
    waits: bool = True  # until its burst is reported


class BurstPlanner:
    """Plans the bursts of drafters with parts, and learns from their reports."""

    def __init__(self, drafters: Mapping[str, Drafts], rounds: Rounds, worth: Calibration) -> None:
        """`worth`: that of the host's steps, which learns from rounds too."""
        self._drafters = drafters
        self._rounds = rounds
        self._worth = worth
        self.forecast = Forecast(PassCosts(rounds.pass_shape))
        self._probes = Probes()
        self._planned: dict[str, _Planned] = {}  # by drafter
        self._last: dict[str, RoundWay] = {}  # of the last burst, by drafter
        self._decoded_ms = 0.0

    def takes(self, sequence: Sequence) -> bool:
        """Whether rounds keep the request's own limits, and none of its drafters has failed. The host runs the other
        sequences, and those with a grammar, because the cost of their rounds depends on the grammar.
        """
        drafter, own = self._drafters[sequence.drafter], sequence.limits
        failed = any(part.key in sequence.dropped for part in drafter.parts.values())
        if failed or sequence.constraint is not None or not (own or drafter.limits).clock:
            return False
        shapes = self._rounds.shapes(sequence.drafter, 1)
        return own is None or not shapes or any(_within(self._way(drafter, plan), own, drafter) for plan in shapes)

    # -- before a burst -----------------------------------------------------------------------------------------------

    def burst(self, name: str, sequences: list[Sequence]) -> Plan:
        """The plan of the next burst of these sequences; without rounds, the host runs a step."""
        held = self._planned.get(name)
        most = _TRIAL_STEPS if held is not None and held.promise.way.by_host else 2
        if held is not None and held.waits and held.sequences == sequences and held.asked < most:
            held.asked += 1  # only a round of another shape ran, which had been started ahead
        else:
            held = self._planned[name] = self._decided(name, sequences)
            self._probes.next_step(max(1, held.plan.rounds))
            if held.probe:
                self._probes.begin(held.promise.way.key)
        return held.plan

    def _decided(self, name: str, sequences: list[Sequence]) -> _Planned:
        drafter, count, context = self._drafters[name], len(sequences), _context(sequences)
        limits = [sequence.limits or drafter.limits for sequence in sequences]
        ways = [_PLAIN, *self._open(name, drafter, count, limits)]
        matched = self._matched(drafter, ways, sequences)
        promises = [
            _Promise(way, self._offer(name, way, sequences, matched), self._ms(name, way, sequences, context))
            for way in ways
        ]
        bound = min((each.max_tpot_ms for each in limits if each.max_tpot_ms > 0.0), default=math.inf)
        pace = self.forecast.passes.pace
        quick = [p for p in promises[1:] if pace * p.ms <= bound * (1 + min(pick.accepted for pick in p.offer))]
        able = [promises[0], *quick]
        throughput = all(each.objective == "throughput" for each in limits)
        best, choice = choose_one([p.offer for p in able], [p.ms for p in able], throughput=throughput)
        unknown = not self.forecast.passes.measured  # the first rounds measure plain decoding
        tried = able[0] if unknown else self._tried(able, able[best], choice)
        promise = able[best] if tried is None else tried
        by_shape = {p.way.plan.parts: p for p in promises if not p.way.by_host}
        plan = self._plan(promise.way, trial=tried is not None or not self.forecast.knows(promise.way))
        return _Planned(sequences, promise, plan, tried is not None, by_shape, matched, choice.ms / choice.tokens)

    @staticmethod
    def _plan(way: RoundWay, *, trial: bool) -> Plan:
        if way.by_host:
            return Plan()
        # A chain alone continues a match in the text, which the host looks for before each burst: no round ahead.
        ahead = not trial and (way.model or not way.drafters)
        return replace(way.plan, rounds=_TRIAL_ROUNDS if trial else sizes.TREE_ROUNDS, ahead=ahead)

    def _open(self, name: str, drafter: Drafts, count: int, limits: Seq[Limits]) -> list[RoundWay]:
        """The ways to draft that keep the limits of all sequences."""
        ways = [self._way(drafter, plan) for plan in self._rounds.shapes(name, count)]
        if drafter.off_device:
            ways.append(RoundWay(drafters=drafter.off_device, model=True, by_host=True))
        return [way for way in ways if all(_within(way, each, drafter) for each in set(limits))]

    def _way(self, drafter: Drafts, plan: Plan) -> RoundWay:
        """The way with trees of this shape."""
        shape = replace(plan, rounds=0)
        labels = tuple(label for label, own in zip(drafter.parts, plan.parts, strict=False) if own.drafts)
        return RoundWay(shape, labels, any(not drafter.parts[label].has_signal for label in labels))

    def _matched(self, drafter: Drafts, ways: list[RoundWay], sequences: list[Sequence]) -> list[int]:
        """Tokens of the longest match in each text, if any way drafts from nothing else."""
        matched = [0] * len(sequences)
        for label in {label for way in ways if not way.model for label in way.drafters}:
            for number, sequence in enumerate(sequences):
                signal = drafter.parts[label].signal(sequence)
                if signal is not None and signal.matched >= signal.least:
                    matched[number] = max(matched[number], signal.matched)
        return matched

    def _offer(self, name: str, way: RoundWay, sequences: list[Sequence], matched: list[int]) -> list[Estimate]:
        """What a way promises each sequence."""
        if not way.drafters:
            return [Estimate(bonus=STICKY if self._drafts(name) else MIN_GAIN)] * len(sequences)
        size, bonus = size_class(len(sequences)), STICKY if way == self._last.get(name) else 0.0
        starts: dict[Context, float] = {}
        offer = []
        for sequence, tokens in zip(sequences, matched, strict=True):
            context = Context(match_class(tokens), temperature_class(sequence.params), size)
            if context not in starts:
                starts[context] = self.forecast.accepted(way, context)
            accepted = starts[context] * _tilt(sequence, way.drafters).factor
            accepted = min(accepted, sequence.remaining - 1)
            offer.append(Estimate(way.drafters, None, accepted, way.plan.nodes, 0.0, bonus))
        return offer

    def _drafts(self, name: str) -> bool:
        """Whether the last burst drafted."""
        return bool(self._last.get(name, _PLAIN).drafters)

    def _ms(self, name: str, way: RoundWay, sequences: list[Sequence], context: int) -> float:
        """The cost of a round, with a share of what a drafter has to read first."""
        drafter, count, last = self._drafters[name], len(sequences), self._last.get(name, _PLAIN).drafters
        ms = self.forecast.ms(way, count, context)
        late = [drafter.parts[label] for label in way.drafters if label not in last]  # the others are up to date
        unread = max((part.unread(sequence) for part in late for sequence in sequences), default=0)
        if unread <= _CAUGHT_UP:
            return ms
        room = max(1, min(_PAYBACK, sum(sequence.remaining for sequence in sequences) // count))
        return ms + self.forecast.catch_up_ms(way, count, context, unread) / room

    def _tried(self, able: list[_Promise], chosen: _Promise, choice: Choice) -> _Promise | None:
        """A way that was not chosen, to be tried if the time budget of tries allows it."""
        for promise in sorted(able, key=lambda p: p.tokens / p.ms, reverse=True):
            rounds = _TRIAL_STEPS if promise.way.by_host else _TRIAL_ROUNDS
            lost = rounds * max(0.0, promise.ms - promise.tokens * choice.ms / choice.tokens)
            if promise is not chosen and self._probes.due(promise.way.key, lost, self._decoded_ms):
                return promise
        return None

    # -- after a burst ------------------------------------------------------------------------------------------------

    def observe(self, report: Report) -> None:
        """Learn what a burst cost and brought."""
        shape, items = report.burst, [item for item in report.progress if item.sequence.error is None]
        name = items[0].sequence.drafter if items else ""
        if shape is None or shape.rounds == 0 or not items or not self._drafters[name].parts:
            return
        way = self._way(self._drafters[name], shape)
        count = report.rows // (shape.rounds * (1 + shape.nodes))
        if not report.cold:
            self.forecast.add_burst(way, count, _context([item.sequence for item in items]), shape.rounds, report)
            self._decoded_ms += (report.draft_ms + report.verify_ms) / self.forecast.passes.pace
        warmths = [temperature_class(item.sequence.params) for item in items]
        self._worth.add_tally(report.tally, max(set(warmths), key=warmths.count))
        self.forecast.add_tally(way, report.tally)
        planned = self._planned.get(name)
        self._last[name] = way
        if planned is None:
            return
        as_planned = planned.waits and planned.promise.way == way
        for item in items:
            self._learn(item, way, shape.rounds, count, planned, report)
        planned.waits = planned.waits and not as_planned
        if as_planned and planned.probe:
            ms = report.draft_ms + report.verify_ms + sum(call.ms for call in report.calls)
            instead = planned.pace * sum(item.new_tokens for item in items)
            self._probes.ended(way.key, 0.0 if report.cold else ms / self.forecast.passes.pace - instead)

    def _learn(self, item: Progress, way: RoundWay, rounds: int, count: int, planned: _Planned, report: Report) -> None:
        """Learn from the tokens that a burst gave one sequence."""
        sequence, matched = item.sequence, 0
        if sequence in planned.sequences:
            matched = planned.matched[planned.sequences.index(sequence)]
        if way.drafters and not sequence.finished:  # of an answer that has ended the last rounds are not counted
            context = Context(match_class(matched), temperature_class(sequence.params), size_class(count))
            accepted, expected = item.new_tokens - rounds, self.forecast.accepted(way, context)
            _tilt(sequence, way.drafters).add(expected * rounds, accepted)
            self.forecast.record.add(way.key, context, accepted / rounds, way.plan.nodes)
        promise = planned.promises.get(way.plan.parts) or planned.promises[()]
        pace, plain = self.forecast.passes.pace, planned.promises[()]
        item.decision = Decision(
            way.drafters,
            planned.probe and planned.promise.way == way,
            matched,
            promise.tokens / len(promise.offer),
            promise.ms * pace,
            plain.ms * pace,
            way.plan.nodes * rounds,
            item.new_tokens,
            report.draft_ms,
            report.verify_ms,
            rounds,
        )
        sequence.stats.decisions.append(item.decision)

    def observe_host(self, report: Report) -> None:
        """Learn from a step of the host that was planned here."""
        for name, planned in self._planned.items():
            way, items = planned.promise.way, [item for item in report.progress if item.verified is not None]
            if way.by_host and report.prompt_rows == 0 and [item.sequence for item in items] == planned.sequences:
                self.forecast.add_host(way, len(items), report)
                self._last[name] = way
                for item in items:
                    context = Context(0, temperature_class(item.sequence.params), size_class(len(items)))
                    self.forecast.record.add(way.key, context, item.new_tokens - 1, 0)
                if planned.probe:
                    ms = (report.draft_ms + report.verify_ms) / self.forecast.passes.pace
                    self._probes.ended(way.key, ms - sum(item.new_tokens for item in items) * planned.pace)


def _within(way: RoundWay, limits: Limits, drafter: Drafts) -> bool:
    """Whether a way keeps the limits. What the host drafts is cut to them there."""
    named = limits.drafters is None or {drafter.parts[label].name for label in way.drafters} <= limits.drafters
    return named and limits.nodes >= max(1, way.plan.nodes) and limits.depth >= max(1, way.plan.depth)


def _context(sequences: Seq[Sequence]) -> int:
    """The mean number of tokens per sequence."""
    return sum(len(sequence.tokens) for sequence in sequences) // len(sequences)


def _tilt(sequence: Sequence, drafters: Way) -> Tilt:
    """How much more or less than others this request accepts of these drafters."""
    tilts: dict[Way, Tilt] = sequence.drafting.setdefault(_TILTS, {})
    return tilts.setdefault(drafters, Tilt())
