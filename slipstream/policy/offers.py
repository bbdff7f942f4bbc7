"""The ways to draft that a sequence has in a step, and what each promises: plain decoding is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.policy.base import Drafts, Part
from slipstream.policy.choice import MIN_GAIN, STICKY, Estimate
from slipstream.policy.knowledge import Knowledge
from slipstream.policy.record import Context, RequestRecord, Way, match_class, record_of, size_class
from slipstream.policy.situation import LITTLE_ROOM, Signals
from slipstream.sequence import Sequence
from slipstream.types import Limits

CAUGHT_UP = 8  # tokens that a drafter reads in every step
_UNKNOWN_READ = 0.01  # cost of a token that a drafter reads, in plain passes
_PAYBACK = 64  # tokens over which reading a prompt is paid back
_OPTIONS_HOLD = 4  # steps for which the ways to draft that a sequence has are not estimated anew

# The way in use has the bonus STICKY over other ways to draft. Plain decoding has it too, so it does not count there.
# While plain decoding is in use, ways to draft must exceed it by MIN_GAIN.
_PLAIN, _STAYS_PLAIN = Estimate(bonus=STICKY), Estimate(bonus=MIN_GAIN)


class Options(NamedTuple):
    """What one sequence can do in a step."""

    sequence: Sequence
    record: RequestRecord
    limits: Limits
    offer: list[Estimate]  # plain decoding first
    context: Context


class Offers:
    """Asks the drafters of a sequence what they know at no cost, and the record what each way has brought."""

    def __init__(self, drafters: Mapping[str, Drafts]) -> None:
        self._drafters = drafters

    def signals(self, sequence: Sequence) -> Signals:
        """What the drafters of a sequence know at no cost; nothing if no draft is possible."""
        record, room = record_of(sequence), sequence.remaining - 1
        if record.able is None or len(sequence.dropped) != record.dropped:
            record.able, record.dropped = self._able(sequence), len(sequence.dropped)
        free: Way = ()
        models: Way = ()
        matched = certain = 0
        for label, part in record.able if room > 0 else ():
            signal = part.signal(sequence)
            if signal is None:
                models += (label,)
            elif signal.matched >= signal.least and signal.matched > 0:
                free += (label,)
                matched, certain = max(matched, signal.matched), max(certain, signal.certain)
        return Signals(free, models, matched, match_class(matched), room, certain)

    def _able(self, sequence: Sequence) -> list[tuple[str, Part]]:
        """The drafters that a sequence may use and that have something to draft from."""
        drafter = self._drafters[sequence.drafter]
        limits = sequence.limits or drafter.limits
        if not (limits.nodes and limits.depth):
            return []
        return [
            (label, part)
            for label, part in drafter.parts.items()
            if part.key not in sequence.dropped
            and (limits.drafters is None or part.name in limits.drafters)
            and (part.host_only(sequence) or not part.by_request)
        ]

    def options(self, sequence: Sequence, seen: Signals, count: int, plain_ms: float, known: Knowledge) -> Options:
        """The ways to draft for a sequence; those of a few steps ago, if it is still in that situation."""
        record = record_of(sequence)
        situation = (seen.free, seen.models, seen.match, seen.certain, size_class(count), record.way)
        held: tuple[object, int, Options] | None = record.options
        if held is not None and held[0] == situation and record.step < held[1] and seen.room >= LITTLE_ROOM:
            return held[2]
        found = self._offered(sequence, record, seen, size_class(count), plain_ms, known)
        record.options = situation, record.step + _OPTIONS_HOLD, found
        return found

    def _offered(
        self,
        sequence: Sequence,
        record: RequestRecord,
        seen: Signals,
        size: int,
        plain_ms: float,
        known: Knowledge,
    ) -> Options:
        """The ways to draft for a sequence, plain decoding first."""
        drafter = self._drafters[sequence.drafter]
        limits = sequence.limits or drafter.limits
        plain = _STAYS_PLAIN if not record.way else _PLAIN
        temp_class, costs = record.temp_class, known.draft_costs
        found, models, _, match, room, certain = seen
        own_ms = sum(costs.call(label, 1, 0.0) for label in found)
        without = Context(0, temp_class, size)
        context = Context(match, temp_class, size) if found else without
        offers = [plain]
        befores: tuple[Way, ...] = ((), found) if found else ((),)
        for model in (None, *models):
            for before in befores:
                way = before if model is None else (*before, model)
                if not way or (drafter.exclusive and len(way) > 1):
                    continue
                at = context if before else without
                start = known.record.mean(way, at, model=model is not None)
                accepted, nodes = record.mean(way, at.match, start)
                if before:
                    accepted, nodes = max(accepted, certain), max(nodes, certain)
                ms = costs.beside + (own_ms if before else 0.0)
                if model is not None and (unread := drafter.parts[model].unread(sequence)) > CAUGHT_UP:
                    share = (1 + accepted) / max(1, min(room, _PAYBACK))
                    ms += share * costs.catch_up(model, unread, _UNKNOWN_READ * plain_ms)
                bonus = STICKY if way == record.way else 0.0
                offers.append(Estimate(way, model, min(accepted, room), nodes, ms, bonus))
        return Options(sequence, record, limits, offers, context)
