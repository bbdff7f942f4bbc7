"""The policy that decides: for each sequence and step which drafters draft, how much, and what of it is verified.

A *way* to draft is a tuple of labels: the drafters that one sequence asks in one step. The trees of several are merged;
the empty way is plain decoding.

Before anything is drafted the policy compares the ways by tokens per millisecond: what each brought this request and
others (`record`), and what passes and drafts cost (`costs`). After drafting it verifies the nodes that pay for their
rows (`selection`). Ways that are not chosen are tried now and then, for at most 1% of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.policy.base import Drafts, Rounds
from slipstream.policy.burst_planner import BurstPlanner
from slipstream.policy.choice import Choice, Estimate, Milliseconds, choose, row_cost, short_try
from slipstream.policy.fixed import FixedPolicy
from slipstream.policy.knowledge import Knowledge
from slipstream.policy.lessons import learn, lost_by_try
from slipstream.policy.offers import CAUGHT_UP, Offers, Options
from slipstream.policy.probes import EVERY, Probes
from slipstream.policy.record import RECORD, Context, Pending, RequestRecord, record_of
from slipstream.policy.report import Progress, Report
from slipstream.policy.selection import selected
from slipstream.policy.situation import Kept, Signals
from slipstream.sequence import Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Limits, Plan

_PLAIN_STEPS = 2  # without drafts, where the cost of a plain pass is not known
# A drafter's threshold is this fraction of the break-even probability, because its confidences are not calibrated.
_THRESHOLD_FRACTION = 0.7

_NO_DRAFT = Plan()


class AutoPolicy:
    """Picks among the parts of a drafter by what was measured. A drafter without parts is planned by its options."""

    def __init__(
        self, drafters: Mapping[str, Drafts], rounds: Rounds | None, shape: Callable[[int], float] | None = None
    ) -> None:
        self._drafters = drafters
        self._rounds = rounds
        shape = shape or (lambda rows: 1.0 + 0.05 * (rows - 1))
        self.known = Knowledge(shape)
        self._saved = Knowledge(shape)  # the knowledge at the start: requests with `clock=no` are decided by it
        self.rounds = None if rounds is None else BurstPlanner(drafters, rounds, self.known.worth)
        self._fixed = FixedPolicy(drafters, rounds, self.rounds)
        self._offers = Offers(drafters)
        self._probes = Probes()
        self.decoded_ms = 0.0  # of all steps that decoded
        self._decided_ms = 0.0  # of steps that were decided here: tries may take a share of it
        self._kept: Kept | None = None
        self._plain_in_a_row = 0  # decisions not to draft
        self._turn = 0  # the sequence of a batch that tries something next
        self._drafted_ms = 0.0  # of the step under way

    # -- before drafting ----------------------------------------------------------------------------------------------

    def plan(self, work: Seq[Work], *, waiting: bool) -> dict[Sequence, Plan]:
        """Sequences with a choice of drafters share one decision; the others have the plan of their drafter."""
        adaptive = [item for item in work if self._drafters[item.sequence.active_drafter].parts]
        if not adaptive:
            return self._fixed.plan(work, waiting=waiting)
        # Device rounds have one shape for a batch: `burst_planner.py` picks it, or leaves the sequences to the host.
        decided_here = set(map(id, adaptive)) if self._rounds is None else set()
        rest = [item for item in work if id(item) not in decided_here]
        plans = self._fixed.plan(rest, waiting=waiting) if rest else {}
        by_host = [item for item in adaptive if item.sequence not in plans or not plans[item.sequence].rounds]
        plans.update((item.sequence, _NO_DRAFT) for item in by_host)
        decoding = [item.sequence for item in by_host if item.decodes and len(item.pending) == 1]
        if decoding:
            # The first token of others is not kept waiting for drafts: prompts are fed in plain steps.
            prompts = any(len(item.pending) > 1 or not item.decodes for item in work)
            planned = set(decoding)
            beside = [
                item.sequence
                for item in work
                if item.decodes and item.sequence not in planned and not plans[item.sequence].rounds
            ]
            plans.update(self._by_clock(decoding, beside, prompts=prompts))
        return plans

    def single(self, sequence: Sequence) -> Plan:
        """The plan of one host step."""
        if self._drafters[sequence.active_drafter].parts:
            return self._by_clock([sequence], [])[sequence]
        return self._fixed.single(sequence)

    def _limits(self, sequence: Sequence) -> Limits:
        return sequence.limits or self._drafters[sequence.drafter].limits

    def _by_clock(
        self, sequences: list[Sequence], beside: list[Sequence], *, prompts: bool = False
    ) -> dict[Sequence, Plan]:
        """The plans of all sequences. Those with `clock=no` are decided independently of all others.

        `beside`: sequences of the same pass that are not planned here.
        """
        apart = [sequence for sequence in sequences if not self._limits(sequence).clock]
        plans = {sequence: self._decided_apart(sequence) for sequence in apart}
        together = [sequence for sequence in sequences if sequence not in plans] if apart else sequences
        if together and prompts:
            plain_ms = self.known.curve(together)[len(together)]
            return plans | {sequence: self._plain(sequence, plain_ms, measures=False) for sequence in together}
        return plans | self._reuse_or_decide(together, [*beside, *apart]) if together else plans

    def _decided_apart(self, sequence: Sequence) -> Plan:
        """The plan by saved costs and the request's own counts, as if it were alone."""
        signals, curve = self._offers.signals(sequence), self._saved.curve([sequence])
        option = self._offers.options(sequence, signals, 1, curve[1], self._saved)
        choice, calls = self._chosen([option], self._saved, curve, measured=bool(curve.medians))
        return self._planned(option, signals.matched, choice.picks[0], choice, calls, curve, self._saved)

    def _reuse_or_decide(self, sequences: list[Sequence], beside: list[Sequence]) -> dict[Sequence, Plan]:
        """The plans of the last decision while it holds, else those of a new one."""
        self._probes.next_step()
        kept = self._kept
        if kept is not None and kept.holds_blindly(sequences):
            return self._reused(kept)
        signals = [self._offers.signals(sequence) for sequence in sequences]
        if kept is not None and kept.holds(sequences, signals):
            return self._reused(kept)
        plans = self._decide_anew(sequences, signals, beside)
        pending = {sequence: found for sequence in sequences if (found := record_of(sequence).pending) is not None}
        drafts = any(item.way and not item.probe for item in pending.values())
        self._plain_in_a_row = 0 if drafts else self._plain_in_a_row + 1
        probes = any(item.probe for item in pending.values())
        self._kept = None if probes else Kept(sequences, signals, plans, pending, self._plain_in_a_row)
        return plans

    @staticmethod
    def _reused(kept: Kept) -> dict[Sequence, Plan]:
        """The plans of a decision that still holds."""
        for sequence in kept.sequences:
            record = record_of(sequence)
            record.step += 1
            record.pending = kept.pending[sequence]
            if record.promised:
                record.promised = {}
        return kept.plans

    def _decide_anew(
        self, sequences: list[Sequence], signals: list[Signals], beside: list[Sequence]
    ) -> dict[Sequence, Plan]:
        count, known = len(sequences), self.known
        curve = known.curve([*sequences, *beside])
        cost = curve.above(len(beside))
        # The first steps measure what plain decoding costs; beside others, whose drafts may be in every pass, any pass.
        if (curve.measured if beside else curve.samples(count)) < _PLAIN_STEPS:
            return {sequence: self._plain(sequence, cost[count]) for sequence in sequences}
        options = [
            self._offers.options(s, seen, count, cost[1], known) for s, seen in zip(sequences, signals, strict=True)
        ]
        choice, calls = self._chosen(options, known, cost)
        if self._measures_plain(choice, cost[count]):
            return {sequence: self._plain(sequence, cost[count]) for sequence in sequences}
        place, probe = self._probe(options, choice, calls, cost)
        plans = {}
        for number, (option, chosen) in enumerate(zip(options, choice.picks, strict=True)):
            tried = probe if number == place else None
            plans[option.sequence] = self._planned(
                option, signals[number].matched, chosen, choice, calls, cost, known, tried
            )
        return plans

    @staticmethod
    def _chosen(
        options: list[Options], known: Knowledge, cost: Milliseconds, *, measured: bool = True
    ) -> tuple[Choice, dict[str, float]]:
        """The best ways within the limits of all, and the cost of each shared call. Unless `measured`, costs are
        relative and not milliseconds, so no bound on the time per token can be guaranteed.
        """
        offers = [option.offer for option in options]
        calls = known.calls(offers, cost[len(options)])
        throughput = all(option.limits.objective == "throughput" for option in options)
        choice = choose(offers, cost, calls, throughput=throughput)
        if not _keeps_pace(options, choice.picks, known.costs.pace * choice.ms if measured else math.inf):
            choice = choose([offer[:1] for offer in offers], cost, calls)
        return choice, calls

    def _measures_plain(self, choice: Choice, plain_ms: float) -> bool:
        """Whether this step decodes plainly, to measure that again, although drafting promises more.

        What drafting gains is computed from the measured cost of a plain step, which may have changed since.
        """
        if not any(pick.drafters for pick in choice.picks):
            return False
        lost = plain_ms * choice.tokens / choice.ms - len(choice.picks)  # tokens
        lost_ms = lost * choice.ms / choice.tokens
        if not self._probes.due((), lost_ms, self._decided_ms):
            return False
        self._probes.begin(())
        self._probes.ended((), lost_ms)
        return True

    def _probe(
        self, options: list[Options], choice: Choice, calls: Mapping[str, float], cost: Milliseconds
    ) -> tuple[int, Estimate | None]:
        """A way that was not chosen, to be tried on one sequence if the time budget of tries allows it."""
        count, pace = len(options), self.known.costs.pace
        for place in ((self._turn + number) % count for number in range(count)):
            option, chosen = options[place], choice.picks[place]
            record = option.record
            for whole in option.offer[1:]:
                way = whole.drafters
                if way == chosen.drafters or record.step - record.tried.get(way, -EVERY) < EVERY:
                    continue
                pick, call_ms = whole, calls.get(whole.shared or "", 0.0)
                if way == (whole.shared,) and not self._probes.paid(way):
                    pick = short_try(whole)
                    call_ms = min(call_ms, 2 * self.known.draft_costs.level(way[0], 1) or call_ms)
                ms = (pick.nodes - chosen.nodes) * row_cost(cost, count) + pick.own_ms - chosen.own_ms
                ms += call_ms - calls.get(chosen.shared or "", 0.0)
                lost = max(0.0, ms + (chosen.accepted - pick.accepted) * choice.ms / choice.tokens)
                picks = [*choice.picks[:place], pick, *choice.picks[place + 1 :]]
                if not _keeps_pace(options, picks, pace * (choice.ms + max(0.0, ms))):
                    continue
                if self._probes.due(way, lost, self._decided_ms):
                    self._probes.begin(way)
                    self._turn = place + 1
                    return place, pick
        return -1, None

    def _plain(self, sequence: Sequence, ms: float, *, measures: bool = True) -> Plan:
        record = record_of(sequence)
        record.step += 1
        record.pending = Pending(
            way=(),
            context=Context(match=0, temp_class=record.temp_class, size=0),
            matched=0,
            probe=measures,
            expected_tokens=1,
            expected_ms=ms,
            plain_ms=ms,
            chosen_tokens=1,
            rate=1 / ms,
        )
        return _NO_DRAFT

    def _planned(
        self,
        option: Options,
        matched: int,
        chosen: Estimate,
        choice: Choice,
        calls: Mapping[str, float],
        cost: Milliseconds,
        known: Knowledge,
        probe: Estimate | None = None,
    ) -> Plan:
        """The plan of a pick, which is remembered until the step is observed. `probe`: tried instead of the chosen."""
        sequence, record, limits, pick = option.sequence, option.record, option.limits, probe or chosen
        way, rate, count = pick.drafters, choice.tokens / choice.ms, len(choice.picks)
        record.step += 1
        record.tried[way] = record.step
        if probe is None:
            record.way = way
        record.promised = {}
        context = option.context if len(way) > (pick.shared is not None) else option.context._replace(match=0)
        record.pending = Pending(
            way=way,
            context=context,
            matched=matched,
            probe=probe is not None,
            expected_tokens=1 + pick.accepted,
            expected_ms=choice.ms,
            plain_ms=cost[count],
            chosen_tokens=1 + chosen.accepted,
            rate=rate,
            short=pick.short,
            model=pick.shared is not None,
            draft_ms=pick.own_ms + calls.get(pick.shared or "", 0.0),
        )
        if not way:
            return _NO_DRAFT
        # Tokens that the time of a row would yield elsewhere: less likely nodes are not worth their row.
        break_even = rate * row_cost(cost, count + int(sum(each.nodes for each in choice.picks)))
        min_confidence = max(0.01, _THRESHOLD_FRACTION * min(0.5, break_even))
        depth = min(limits.depth, sequence.remaining - 1)
        parts, total_nodes, max_depth = [], 0, 0
        for label, part in self._drafters[sequence.drafter].parts.items():
            if label not in way:
                parts.append(_NO_DRAFT)
                continue
            own = self._fixed.host_plan(part)
            min_level = min(0.9, rate * known.draft_costs.level(label, count)) if label == pick.shared else 0.0
            levels, nodes = min(depth, own.depth), min(limits.nodes, own.nodes)
            if pick.short:
                levels, nodes = min(levels, 1), min(nodes, 1)
            parts.append(Plan(levels, nodes, own.branch, min_confidence, min_level))
            total_nodes, max_depth = total_nodes + nodes, max(max_depth, levels)
        return Plan(max_depth, min(limits.nodes, total_nodes), parts=tuple(parts))

    # -- after drafting -----------------------------------------------------------------------------------------------

    def select(self, trees: Mapping[Sequence, TokenTree], plans: Mapping[Sequence, Plan]) -> dict[Sequence, TokenTree]:
        """The nodes of all sequences that are worth their rows. Sampled trees stay as they were planned."""
        chosen = {s: t for s, t in trees.items() if len(t) > 1 and plans[s].parts and not t.sampled}
        kept = self._fixed.select({s: t for s, t in trees.items() if s not in chosen}, plans)
        for sequence in [s for s in chosen if not self._limits(s).clock]:
            alone, pending = {sequence: chosen.pop(sequence)}, record_of(sequence).pending
            expected_ms = 0.0 if pending is None else pending.draft_ms
            kept |= selected(alone, plans, self._saved, self._saved.curve([sequence]), 1, expected_ms)
        if not chosen:
            return kept
        # Rows that the pass has in any case: the trees above, and the roots of those whose nodes are to be chosen.
        rows = sum(len(tree) for tree in kept.values()) + len(chosen)
        return kept | selected(chosen, plans, self.known, self.known.curve(list(trees)), rows, self._drafted_ms)

    def drafted(self, ms: float) -> None:
        """How long the drafts of the step under way took."""
        self._drafted_ms = ms / self.known.costs.pace

    # -- after the pass -----------------------------------------------------------------------------------------------

    def observe(self, report: Report) -> None:
        """Learn what the pass cost and what was accepted."""
        if self.rounds is not None:
            self.rounds.observe(report)
            self.rounds.observe_host(report)
        if report.burst is not None:
            self.decoded_ms += report.draft_ms + report.verify_ms
            return
        decoded = [item for item in report.progress if item.verified is not None]
        if not decoded:
            return
        self._learn_costs(decoded, report)
        ms = (report.draft_ms + report.verify_ms) / self.known.costs.pace
        self.decoded_ms += ms
        decided = [self._learn(item, report) for item in decoded]
        if any(decided) and report.prompt_rows == 0:
            self._decided_ms += ms

    def _learn_costs(self, decoded: list[Progress], report: Report) -> None:
        known, costs = self.known, self.known.draft_costs
        if report.prompt_rows == 0 and len(decoded) == len(report.progress):
            context = sum(len(item.sequence.tokens) for item in decoded) // len(decoded)
            known.costs.add(len(decoded), context, report.rows, report.verify_ms)
        pace = known.costs.pace
        for call in report.calls:
            if call.read > CAUGHT_UP:
                costs.add_catch_up(call.drafter, call.read, call.ms / pace)
            else:
                costs.add(call.drafter, call.sequences, call.levels, call.ms / pace, short=call.short)
        if report.calls:
            beside = report.draft_ms - sum(call.ms for call in report.calls)
            costs.add_beside(max(0.0, beside) / pace / max(call.sequences for call in report.calls))

    def _learn(self, item: Progress, report: Report) -> bool:
        """Learn from one sequence; returns whether its step was decided here by the clock."""
        record: RequestRecord | None = item.sequence.drafting.get(RECORD)
        pending = None if record is None else record.pending
        if record is None or pending is None:
            return False
        record.pending = None
        shared = self._limits(item.sequence).clock
        learn(item, report, record, pending, self.known if shared else self._saved, shared=shared)
        if pending.way and pending.probe:
            lost = lost_by_try(item, report, pending, self.known)
            self._probes.ended(pending.way, lost, len(report.progress))
            if lost <= 0.0:
                self._plain_in_a_row = 0  # signals are read again in the next steps
        return shared

    # -- between runs -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        rounds = {} if self.rounds is None else {"rounds": self.rounds.forecast.state()}
        return self.known.state() | rounds

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier run learnt."""
        self.known.restore(state, doubted=True)
        self._saved.restore(state, doubted=False)
        if self.rounds is not None and "rounds" in state:
            self.rounds.forecast.restore(state["rounds"])


def _keeps_pace(options: list[Options], picks: list[Estimate], ms: float) -> bool:
    """Whether a step of `ms` milliseconds keeps each request's bound on the time of a token."""
    return all(
        ms <= option.limits.max_tpot_ms * (1 + pick.accepted)
        for option, pick in zip(options, picks, strict=True)
        if option.limits.max_tpot_ms > 0.0
    )
