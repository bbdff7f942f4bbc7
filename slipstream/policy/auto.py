"""The policy that decides: for each sequence and step which drafters draft, how much, and what of it is verified.

Before anything is drafted it compares the ways to draft by tokens per millisecond: what each brought this request and
others (`record`), and what passes and drafts cost (`costs`). After drafting it verifies the nodes that pay for their
rows (`worth`, `choice`). Ways that are not chosen are tried now and then, for at most 1% of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.policy.base import Drafts, Rounds
from slipstream.policy.choice import MIN_GAIN, STICKY, Choice, Estimate, best_count, choose, row_cost
from slipstream.policy.costs import Curve, DraftCosts, PassCosts
from slipstream.policy.fixed import FixedPolicy
from slipstream.policy.record import Context, Pending, Record, RequestRecord, Way, match_class, size_class
from slipstream.policy.report import Progress, Report
from slipstream.policy.worth import Calibration, Tilt, temperature_class
from slipstream.sequence import Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Decision, Limits, Plan

_RECORD = "policy.record"  # key in `Sequence.drafting`
_PLAIN_STEPS = 2  # without drafts, where the cost of a plain pass is not known
_PROBE_SHARE = 0.01  # of the time, for ways that are not chosen
_PROBE_EVERY = 8  # steps of a request between two tries of one way
_UNKNOWN_CALL = 0.1  # cost of a drafter that was never called, in plain passes
_CAUGHT_UP = 8  # tokens that a drafter reads in every step
_PAYBACK = 64  # tokens over which reading a prompt is paid back
_LOOSE = 0.7  # a drafter's own confidence may be too low: it drafts down to this part of what pays


_PLAIN, _STAYS_PLAIN = Estimate(), Estimate(bonus=MIN_GAIN)
_NO_DRAFT = Plan()
_KEPT_ROOM = 24  # tokens: near the end of an answer every step is decided anew
_LONG_MATCH = 3  # class of match


class _Signals(NamedTuple):
    """What is known of a sequence before anything is decided."""

    free: Way  # drafters that found something to draft from
    models: Way
    matched: int  # tokens of the longest match in the text
    match: int  # its class
    room: int  # tokens that can still be drafted


@dataclass
class _Kept:
    """A decision that holds for a few steps, unless something is new: deciding costs time, too."""

    sequences: list[Sequence]
    signals: list[_Signals]
    plans: dict[Sequence, Plan]
    pending: dict[Sequence, Pending]
    steps: int = 3  # left

    def holds(self, sequences: list[Sequence], signals: list[_Signals]) -> bool:
        """Whether these sequences are still in the same situation: only longer matches in the text are news."""
        if self.steps <= 0 or sequences != self.sequences:
            return False
        for now, before in zip(signals, self.signals, strict=True):
            longer = max(now.match, before.match) >= _LONG_MATCH and now.match != before.match
            if longer or now.room < _KEPT_ROOM or now.models != before.models:
                return False
        return True


class _Options(NamedTuple):
    """What one sequence can do in a step."""

    sequence: Sequence
    record: RequestRecord
    limits: Limits
    offer: list[Estimate]  # plain decoding first
    context: Context
    matched: int  # tokens of the longest match in the text


class AutoPolicy:
    """Plans drafters that have parts by what was measured, and all others by their options."""

    def __init__(
        self, drafters: Mapping[str, Drafts], rounds: Rounds | None, shape: Callable[[int], float] | None = None
    ) -> None:
        self._drafters = drafters
        self._rounds = rounds
        self._fixed = FixedPolicy(drafters, rounds)
        self.costs = PassCosts(shape or (lambda rows: 1.0 + 0.05 * (rows - 1)))
        self.draft_costs = DraftCosts()
        self.worth = Calibration()
        self.record = Record()
        self._spent: dict[Way, float] = {}  # milliseconds of probes
        self.decoded_ms = 0.0  # of steps that decoded
        self._kept: _Kept | None = None
        self._drafted_ms = 0.0  # of the step under way

    # -- before drafting ----------------------------------------------------------------------------------------------

    def plan(self, work: Seq[Work], *, waiting: bool) -> dict[Sequence, Plan]:
        """Sequences with a choice of drafters share one decision; the others have the plan of their drafter."""
        adaptive = [item for item in work if self._drafters[item.sequence.active_drafter].parts]
        if not adaptive:
            return self._fixed.plan(work, waiting=waiting)
        # Device rounds have fixed shapes: those of its drafter are used as they are.
        chosen = set(map(id, adaptive)) if self._rounds is None else set()
        plans = self._fixed.plan([item for item in work if id(item) not in chosen], waiting=waiting)
        # The first token is not kept waiting for a draft: prompts end in a plain step.
        by_host = [item for item in adaptive if item.sequence not in plans or not plans[item.sequence].rounds]
        plans.update((item.sequence, _NO_DRAFT) for item in by_host)
        decoding = [item.sequence for item in by_host if item.decodes and len(item.pending) == 1]
        if decoding:
            plans.update(self._decide(decoding))
        return plans

    def single(self, sequence: Sequence) -> Plan:
        """The plan of one host step."""
        if self._drafters[sequence.active_drafter].parts:
            return self._decide([sequence])[sequence]
        return self._fixed.single(sequence)

    def _decide(self, sequences: list[Sequence]) -> dict[Sequence, Plan]:
        signals = [self._signals(sequence) for sequence in sequences]
        kept = self._kept
        if kept is not None and kept.holds(sequences, signals):
            kept.steps -= 1
            for sequence in sequences:
                record = _record(sequence)
                record.step += 1
                record.pending, record.promised = kept.pending[sequence], {}
            return kept.plans
        plans = self._decided(sequences, signals)
        pending = {sequence: found for sequence in sequences if (found := _record(sequence).pending) is not None}
        probes = any(item.probe for item in pending.values())
        self._kept = None if probes else _Kept(sequences, signals, plans, pending)
        return plans

    def _decided(self, sequences: list[Sequence], signals: list[_Signals]) -> dict[Sequence, Plan]:
        count = len(sequences)
        curve = self._curve(sequences)
        clock = (sequences[0].limits or self._drafters[sequences[0].drafter].limits).clock
        if clock and curve.samples(count) < _PLAIN_STEPS:  # the first steps measure what plain decoding costs
            return {sequence: self._plain(sequence, curve[count]) for sequence in sequences}
        options = [self._options(sequence, seen, count) for sequence, seen in zip(sequences, signals, strict=True)]
        offers = [option.offer for option in options]
        calls = {
            label: self._call_ms(label, count, curve)
            for label in {pick.shared for offer in offers for pick in offer}
            if label is not None
        }
        limits = options[0].limits
        choice = choose(offers, curve, calls, throughput=limits.objective == "throughput")
        if 0.0 < limits.max_tpot_ms < choice.ms / (1 + min(pick.accepted for pick in choice.picks)):
            choice = choose([offer[:1] for offer in offers], curve, calls)
        place, probe = self._probe(options, choice, calls, curve)
        rows = count + int(sum(pick.nodes for pick in choice.picks))
        row_ms = row_cost(curve, rows)
        plans = {}
        for number, (option, chosen) in enumerate(zip(options, choice.picks, strict=True)):
            tried = number == place and probe is not None
            pick = probe if tried and probe is not None else chosen
            plans[option.sequence] = self._planned(option, pick, choice, row_ms, curve[count], tried)
        return plans

    def _curve(self, sequences: Seq[Sequence]) -> Curve:
        context = sum(len(sequence.tokens) for sequence in sequences) // len(sequences)
        return self.costs.curve(len(sequences), context)

    def _call_ms(self, label: str, count: int, curve: Curve) -> float:
        known = self.draft_costs.call(label, count)
        return _UNKNOWN_CALL * curve[count] if known is None else known

    def _signals(self, sequence: Sequence) -> _Signals:
        """What the drafters of a sequence know at no cost; nothing if no draft is possible."""
        drafter = self._drafters[sequence.drafter]
        limits, room = sequence.limits or drafter.limits, sequence.remaining - 1
        free: list[str] = []
        models: list[str] = []
        matched = 0
        if room > 0 and limits.nodes and limits.depth:
            for label, part in drafter.parts.items():
                if part.key in sequence.dropped or (limits.drafters is not None and part.name not in limits.drafters):
                    continue
                signal = part.signal(sequence)
                if signal is None:
                    models.append(label)
                elif signal.matched >= signal.least and signal.matched > 0:
                    free.append(label)
                    matched = max(matched, signal.matched)
        return _Signals(tuple(free), tuple(models), matched, match_class(matched), room)

    def _options(self, sequence: Sequence, seen: _Signals, count: int) -> _Options:
        """The ways to draft for a sequence, plain decoding first."""
        drafter, record = self._drafters[sequence.drafter], _record(sequence)
        limits = sequence.limits or drafter.limits
        plain = _STAYS_PLAIN if not record.way else _PLAIN
        warmth, size = record.warmth, size_class(count)
        found, models, matched, _, room = seen
        own_ms = sum(self.draft_costs.call(label, 1) or 0.0 for label in found)
        without = Context(0, warmth, size)
        context = Context(seen.match, warmth, size) if found else without
        offers = [plain]
        befores: tuple[Way, ...] = ((), found) if found else ((),)
        for model in (None, *models):
            for before in befores:
                way = before if model is None else (*before, model)
                if not way or (drafter.exclusive and len(way) > 1):
                    continue
                at = context if before else without
                start = self.record.mean(way, at, model=model is not None)
                accepted, nodes = record.mean(way, at.match, start)
                ms = own_ms if before else 0.0
                if model is not None and (unread := drafter.parts[model].unread(sequence)) > _CAUGHT_UP:
                    share = (1 + accepted) / max(1, min(room, _PAYBACK))
                    ms += share * self.draft_costs.catch_up(model, unread)
                bonus = STICKY if way == record.way else 0.0
                offers.append(Estimate(way, model, min(accepted, room), nodes, ms, bonus))
        return _Options(sequence, record, limits, offers, context, matched)

    def _probe(
        self, options: list[_Options], choice: Choice, calls: Mapping[str, float], curve: Curve
    ) -> tuple[int, Estimate | None]:
        """A way to try on one sequence though it was not chosen, if the time for such tries allows it."""
        allowed = _PROBE_SHARE * self.decoded_ms
        for place, (option, chosen) in enumerate(zip(options, choice.picks, strict=True)):
            record = option.record
            for pick in option.offer[1:]:
                way = pick.drafters
                if way == chosen.drafters or record.step - record.tried.get(way, -_PROBE_EVERY) < _PROBE_EVERY:
                    continue
                ms = (pick.nodes - chosen.nodes) * row_cost(curve, len(options)) + pick.own_ms - chosen.own_ms
                ms += calls.get(pick.shared or "", 0.0) - calls.get(chosen.shared or "", 0.0)
                lost = max(0.0, ms + (chosen.accepted - pick.accepted) * choice.ms / choice.tokens)
                if self._spent.get(way, 0.0) + lost <= allowed:
                    return place, pick
        return -1, None

    def _plain(self, sequence: Sequence, ms: float) -> Plan:
        record = _record(sequence)
        record.step += 1
        record.pending = Pending((), Context(0, record.warmth, 0), 0, True, 1, ms, ms, 1, 1 / ms)
        return Plan()

    def _planned(
        self, option: _Options, pick: Estimate, choice: Choice, row_ms: float, plain_ms: float, probe: bool
    ) -> Plan:
        """The plan of a pick, which is remembered until the step is observed. `row_ms`: cost of one more row."""
        sequence, record, limits = option.sequence, option.record, option.limits
        way, rate = pick.drafters, choice.tokens / choice.ms
        record.step += 1
        record.tried[way] = record.step
        if not probe:
            record.way = way
        record.promised = {}
        context = option.context if len(way) > (pick.shared is not None) else option.context._replace(match=0)
        instead = choice.tokens / len(choice.picks)
        record.pending = Pending(
            way, context, option.matched, probe, 1 + pick.accepted, choice.ms, plain_ms, instead, rate
        )
        if not way:
            return Plan()
        least = max(0.01, _LOOSE * min(0.5, rate * row_ms))  # a node below this does not pay for its row
        depth = min(limits.depth, sequence.remaining - 1)
        parts, most, deepest = [], 0, 0
        for label, part in self._drafters[sequence.drafter].parts.items():
            if label not in way:
                parts.append(_NO_DRAFT)
                continue
            own = self._fixed.host_plan(part)
            level = min(0.9, rate * self.draft_costs.level(label)) if label == pick.shared else 0.0
            levels, nodes = min(depth, own.depth), min(limits.nodes, own.nodes)
            parts.append(Plan(levels, nodes, own.branch, least, level))
            most, deepest = most + nodes, max(deepest, levels)
        return Plan(deepest, min(limits.nodes, most), parts=tuple(parts))

    # -- after drafting -----------------------------------------------------------------------------------------------

    def select(self, trees: Mapping[Sequence, TokenTree], plans: Mapping[Sequence, Plan]) -> dict[Sequence, TokenTree]:
        """Of all sequences' nodes those that pay for their rows. Sampled trees stay as they were planned."""
        open_trees = {s: t for s, t in trees.items() if len(t) > 1 and plans[s].parts and not t.sampled}
        kept = self._fixed.select({s: t for s, t in trees.items() if s not in open_trees}, plans)
        if not open_trees:
            return kept
        # Every tree but those under decision is in the pass already.
        count = sum(len(tree) for tree in kept.values()) + len(open_trees)
        curve = self._curve(list(trees))
        survivals = {s: self.worth.survivals(t, _record(s).warmth, _record(s).tilts) for s, t in open_trees.items()}
        ranked = sorted((value for values in survivals.values() for value in values[1:]), reverse=True)
        ranked = ranked[: sum(plans[s].nodes for s in open_trees)]
        best = best_count(ranked, count, curve, self._drafted_ms)
        bar = ranked[best - 1] if best else 2.0
        for sequence, tree in open_trees.items():
            values, promised, origins = survivals[sequence], _record(sequence).promised, tree.origins
            nodes = [0]
            for node in range(1, len(values)):
                if values[node] >= bar:
                    nodes.append(node)
                    origin = origins[node] or ""
                    promised[origin] = promised.get(origin, 0.0) + values[node]
            kept[sequence] = tree if len(nodes) == len(tree) else tree.kept(nodes)
        return kept

    def drafted(self, ms: float) -> None:
        """How long the drafts of the step under way took."""
        self._drafted_ms = ms

    # -- after the pass -----------------------------------------------------------------------------------------------

    def observe(self, report: Report) -> None:
        """Learn what the pass cost and what was accepted."""
        clock = True
        decoded = [item for item in report.progress if item.verified is not None]
        for item in decoded:
            limits = item.sequence.limits or self._drafters[item.sequence.drafter].limits
            clock = clock and limits.clock
            self._learn(item, report, limits)
        if not clock or not decoded:
            return
        self.decoded_ms += report.draft_ms + report.verify_ms
        for call in report.calls:
            if call.read > _CAUGHT_UP:
                self.draft_costs.add_catch_up(call.drafter, call.read, call.ms)
            else:
                self.draft_costs.add(call.drafter, call.sequences, call.levels, call.ms)
        if report.prompt_rows == 0 and len(decoded) == len(report.progress):
            context = sum(len(item.sequence.tokens) for item in decoded) // len(decoded)
            self.costs.curve(len(decoded), context).add(report.rows, report.verify_ms)

    def _learn(self, item: Progress, report: Report, limits: Limits) -> None:
        sequence = item.sequence
        record: RequestRecord | None = sequence.drafting.get(_RECORD)
        pending = None if record is None else record.pending
        if record is None or pending is None or item.verified is None:
            return
        tree, path = item.verified
        record.pending = None
        drafted = len(tree) > 1
        item.decision = Decision(
            pending.way,
            pending.probe,
            pending.matched,
            pending.tokens,
            pending.ms,
            pending.plain_ms,
            tree.drafted,
            item.new_tokens,
            report.draft_ms,
            report.verify_ms,
        )
        sequence.stats.decisions.append(item.decision)
        if not pending.way:
            return
        record.add(pending.way, pending.context, len(path), tree.drafted)
        if drafted:
            accepted: dict[str, int] = {}
            for node in path:
                origin = tree.origins[node] or ""
                accepted[origin] = accepted.get(origin, 0) + 1
            for origin, promised in record.promised.items():
                record.tilts.setdefault(origin, Tilt()).add(promised, accepted.get(origin, 0))
        if not limits.clock:
            return
        self.record.add(pending.way, pending.context, len(path), tree.drafted)
        if drafted:
            self.worth.add_tree(tree, path, pending.context.warmth)
        if pending.probe:
            lost = report.draft_ms + report.verify_ms - pending.ms + (pending.instead - 1 - len(path)) / pending.rate
            self._spent[pending.way] = self._spent.get(pending.way, 0.0) + max(0.0, lost)

    # -- between runs -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return {
            "passes": self.costs.state(),
            "drafts": self.draft_costs.state(),
            "worth": self.worth.state(),
            "record": self.record.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier run learnt. Costs are absent from what is shipped: they are this machine's."""
        self.worth.restore(state["worth"])
        self.record.restore(state["record"])
        if "passes" in state:
            self.costs.restore(state["passes"])
            self.draft_costs.restore(state["drafts"])


def _record(sequence: Sequence) -> RequestRecord:
    found: RequestRecord | None = sequence.drafting.get(_RECORD)
    if found is None:
        found = sequence.drafting[_RECORD] = RequestRecord(temperature_class(sequence.params))
    return found
