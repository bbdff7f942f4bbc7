"""The policy that decides: for each sequence and step which drafters draft, how much, and what of it is verified.

A *way* to draft is a tuple of labels: the drafters that one sequence asks in one step. The trees of several are merged;
the empty way is plain decoding.

Before anything is drafted the policy compares the ways by tokens per millisecond: what each brought this request and
others (`record`), and what passes and drafts cost (`costs`). After drafting it verifies the nodes that pay for their
rows (`calibration`, `choice`). Ways that are not chosen are tried now and then, for at most 1% of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.policy.base import Drafts, Rounds
from slipstream.policy.burst_planner import BurstPlanner
from slipstream.policy.calibration import Calibration, Tilt
from slipstream.policy.choice import Choice, Estimate, best_count, choose, row_cost, short_try
from slipstream.policy.costs import Curve, DraftCosts, PassCosts
from slipstream.policy.fixed import FixedPolicy
from slipstream.policy.offers import CAUGHT_UP, Offers, Options
from slipstream.policy.probes import EVERY, Probes
from slipstream.policy.record import RECORD, Context, Pending, Record, RequestRecord, record_of
from slipstream.policy.report import Progress, Report
from slipstream.policy.situation import Kept, Signals
from slipstream.sequence import Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Decision, Limits, Plan

_PLAIN_STEPS = 2  # without drafts, where the cost of a plain pass is not known
_UNKNOWN_CALL = 0.1  # cost of a drafter's call, in plain passes
# A drafter's threshold is this fraction of the break-even probability, because its confidences are not calibrated.
_THRESHOLD_FRACTION = 0.7

_NO_DRAFT, _UNTILTED = Plan(), Tilt()


class AutoPolicy:
    """Picks among the parts of a drafter by what was measured. A drafter without parts is planned by its options."""

    def __init__(
        self, drafters: Mapping[str, Drafts], rounds: Rounds | None, shape: Callable[[int], float] | None = None
    ) -> None:
        self._drafters = drafters
        self._rounds = rounds
        self.costs = PassCosts(shape or (lambda rows: 1.0 + 0.05 * (rows - 1)))
        self.draft_costs = DraftCosts()
        self.worth = Calibration()
        self.rounds = None if rounds is None else BurstPlanner(drafters, rounds, self.worth)
        self._fixed = FixedPolicy(drafters, rounds, self.rounds)
        self.record = Record()
        self._offers = Offers(drafters, self.draft_costs, self.record)
        self._probes = Probes()
        self.decoded_ms = 0.0  # of steps that decoded
        self._kept: Kept | None = None
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
        # The first token is not kept waiting for a draft: prompts end in a plain step.
        by_host = [item for item in adaptive if item.sequence not in plans or not plans[item.sequence].rounds]
        plans.update((item.sequence, _NO_DRAFT) for item in by_host)
        decoding = [item.sequence for item in by_host if item.decodes and len(item.pending) == 1]
        if decoding:
            plans.update(self._reuse_or_decide(decoding))
        return plans

    def single(self, sequence: Sequence) -> Plan:
        """The plan of one host step."""
        if self._drafters[sequence.active_drafter].parts:
            return self._reuse_or_decide([sequence])[sequence]
        return self._fixed.single(sequence)

    def _reuse_or_decide(self, sequences: list[Sequence]) -> dict[Sequence, Plan]:
        """The plans of the last decision while it holds, else those of a new one."""
        self._probes.next_step()
        kept = self._kept
        if kept is not None and kept.holds_blindly(sequences):
            return self._reused(kept)
        signals = [self._offers.signals(sequence) for sequence in sequences]
        if kept is not None and kept.holds(sequences, signals):
            kept.steps -= 1
            return self._reused(kept)
        plans = self._decide_anew(sequences, signals)
        pending = {sequence: found for sequence in sequences if (found := record_of(sequence).pending) is not None}
        probes = any(item.probe for item in pending.values())
        plain_in_a_row = 0 if kept is None else kept.plain_in_a_row
        self._kept = None if probes else Kept(sequences, signals, plans, pending, plain_in_a_row)
        return plans

    @staticmethod
    def _reused(kept: Kept) -> dict[Sequence, Plan]:
        """The plans of a decision that still holds."""
        for sequence in kept.sequences:
            record = record_of(sequence)
            record.step += 1
            record.pending, record.promised = kept.pending[sequence], {}
        return kept.plans

    def _decide_anew(self, sequences: list[Sequence], signals: list[Signals]) -> dict[Sequence, Plan]:
        count = len(sequences)
        curve = self._curve(sequences)
        clock = (sequences[0].limits or self._drafters[sequences[0].drafter].limits).clock
        if clock and curve.samples(count) < _PLAIN_STEPS:  # the first steps measure what plain decoding costs
            return {sequence: self._plain(sequence, curve[count]) for sequence in sequences}
        options = [self._offers.options(s, seen, count, curve[1]) for s, seen in zip(sequences, signals, strict=True)]
        offers = [option.offer for option in options]
        calls = {
            label: self.draft_costs.call(label, count, _UNKNOWN_CALL * curve[count])
            for label in {pick.shared for offer in offers for pick in offer}
            if label is not None
        }
        limits = options[0].limits
        choice = choose(offers, curve, calls, throughput=limits.objective == "throughput")
        slowest_tpot = self.costs.pace * choice.ms / (1 + min(pick.accepted for pick in choice.picks))
        if 0.0 < limits.max_tpot_ms < slowest_tpot:
            choice = choose([offer[:1] for offer in offers], curve, calls)
        if self._measures_plain(choice, curve[count]):
            return {sequence: self._plain(sequence, curve[count]) for sequence in sequences}
        place, probe = self._probe(options, choice, calls, curve)
        rows = count + int(sum(pick.nodes for pick in choice.picks))
        row_ms = row_cost(curve, rows)
        plans = {}
        for number, (option, chosen) in enumerate(zip(options, choice.picks, strict=True)):
            tried = number == place and probe is not None
            pick = probe if tried and probe is not None else chosen
            plans[option.sequence] = self._planned(
                option, signals[number].matched, pick, choice, row_ms, curve[count], tried
            )
        return plans

    def _curve(self, sequences: Seq[Sequence]) -> Curve:
        context = sum(len(sequence.tokens) for sequence in sequences) // len(sequences)
        return self.costs.curve(len(sequences), context)

    def _measures_plain(self, choice: Choice, plain_ms: float) -> bool:
        """Whether this step decodes plainly, to measure that again, although drafting promises more.

        What drafting gains is computed from the measured cost of a plain step, which may have changed since.
        """
        if not any(pick.drafters for pick in choice.picks):
            return False
        lost = plain_ms * choice.tokens / choice.ms - len(choice.picks)  # tokens
        lost_ms = lost * choice.ms / choice.tokens
        if not self._probes.due((), lost_ms, self.decoded_ms):
            return False
        self._probes.begin(())
        self._probes.ended((), lost_ms)
        return True

    def _probe(
        self, options: list[Options], choice: Choice, calls: Mapping[str, float], curve: Curve
    ) -> tuple[int, Estimate | None]:
        """A way to try on one sequence though it was not chosen, if the time for such tries allows it."""
        for place, (option, chosen) in enumerate(zip(options, choice.picks, strict=True)):
            record = option.record
            for whole in option.offer[1:]:
                way = whole.drafters
                if way == chosen.drafters or record.step - record.tried.get(way, -EVERY) < EVERY:
                    continue
                pick, call_ms = whole, calls.get(whole.shared or "", 0.0)
                if way == (whole.shared,):
                    pick = short_try(whole)
                    call_ms = min(call_ms, 2 * self.draft_costs.level(way[0]) or call_ms)
                ms = (pick.nodes - chosen.nodes) * row_cost(curve, len(options)) + pick.own_ms - chosen.own_ms
                ms += call_ms - calls.get(chosen.shared or "", 0.0)
                lost = max(0.0, ms + (chosen.accepted - pick.accepted) * choice.ms / choice.tokens)
                if self._probes.due(way, lost, self.decoded_ms):
                    self._probes.begin(way)
                    return place, pick
        return -1, None

    def _plain(self, sequence: Sequence, ms: float) -> Plan:
        record = record_of(sequence)
        record.step += 1
        record.pending = Pending(
            way=(),
            context=Context(match=0, temp_class=record.temp_class, size=0),
            matched=0,
            probe=True,
            expected_tokens=1,
            expected_ms=ms,
            plain_ms=ms,
            chosen_tokens=1,
            rate=1 / ms,
        )
        return Plan()

    def _planned(
        self,
        option: Options,
        matched: int,
        pick: Estimate,
        choice: Choice,
        row_ms: float,
        plain_ms: float,
        probe: bool,
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
        record.pending = Pending(
            way=way,
            context=context,
            matched=matched,
            probe=probe,
            expected_tokens=1 + pick.accepted,
            expected_ms=choice.ms,
            plain_ms=plain_ms,
            chosen_tokens=choice.tokens / len(choice.picks),
            rate=rate,
            short=pick.short,
        )
        if not way:
            return Plan()
        break_even = rate * row_ms  # tokens that the time of a row would bring: less likely nodes do not pay
        min_confidence = max(0.01, _THRESHOLD_FRACTION * min(0.5, break_even))
        depth = min(limits.depth, sequence.remaining - 1)
        parts, total_nodes, max_depth = [], 0, 0
        for label, part in self._drafters[sequence.drafter].parts.items():
            if label not in way:
                parts.append(_NO_DRAFT)
                continue
            own = self._fixed.host_plan(part)
            min_level = min(0.9, rate * self.draft_costs.level(label)) if label == pick.shared else 0.0
            levels, nodes = min(depth, own.depth), min(limits.nodes, own.nodes)
            if pick.short:
                levels, nodes = min(levels, 1), min(nodes, 1)
            parts.append(Plan(levels, nodes, own.branch, min_confidence, min_level))
            total_nodes, max_depth = total_nodes + nodes, max(max_depth, levels)
        return Plan(max_depth, min(limits.nodes, total_nodes), parts=tuple(parts))

    # -- after drafting -----------------------------------------------------------------------------------------------

    def select(self, trees: Mapping[Sequence, TokenTree], plans: Mapping[Sequence, Plan]) -> dict[Sequence, TokenTree]:
        """Of all sequences' nodes those that pay for their rows. Sampled trees stay as they were planned."""
        open_trees = {s: t for s, t in trees.items() if len(t) > 1 and plans[s].parts and not t.sampled}
        kept = self._fixed.select({s: t for s, t in trees.items() if s not in open_trees}, plans)
        if not open_trees:
            return kept
        # Rows that the pass has in any case: the trees above, and the roots of those whose nodes are to be chosen.
        count = sum(len(tree) for tree in kept.values()) + len(open_trees)
        curve = self._curve(list(trees))
        records = {s: record_of(s) for s in open_trees}
        survivals = {
            s: self.worth.survivals(t, records[s].temp_class, records[s].tilts) for s, t in open_trees.items()
        }
        ranked = sorted((value for values in survivals.values() for value in values[1:]), reverse=True)
        ranked = ranked[: sum(plans[s].nodes for s in open_trees)]
        best = best_count(ranked, count, curve, self._drafted_ms)
        threshold = ranked[best - 1] if best else math.inf
        for sequence, tree in open_trees.items():
            values, promised, origins = survivals[sequence], record_of(sequence).promised, tree.origins
            nodes = [0]
            for node in range(1, len(values)):
                if values[node] >= threshold:
                    nodes.append(node)
                    origin = origins[node] or ""
                    promised[origin] = promised.get(origin, 0.0) + values[node]
            kept[sequence] = tree if len(nodes) == len(tree) else tree.subtree(nodes)
        return kept

    def drafted(self, ms: float) -> None:
        """How long the drafts of the step under way took."""
        self._drafted_ms = ms / self.costs.pace

    # -- after the pass -----------------------------------------------------------------------------------------------

    def observe(self, report: Report) -> None:
        """Learn what the pass cost and what was accepted."""
        if self.rounds is not None:
            self.rounds.observe(report)
            self.rounds.observe_host(report)
        if report.burst is not None:
            self.decoded_ms += report.draft_ms + report.verify_ms
            return
        clock = True
        decoded = [item for item in report.progress if item.verified is not None]
        for item in decoded:
            limits = item.sequence.limits or self._drafters[item.sequence.drafter].limits
            clock = clock and limits.clock
            self._learn(item, report, limits)
        if not clock or not decoded:
            return
        if report.prompt_rows == 0 and len(decoded) == len(report.progress):
            context = sum(len(item.sequence.tokens) for item in decoded) // len(decoded)
            self.costs.add(len(decoded), context, report.rows, report.verify_ms)
        pace = self.costs.pace
        self.decoded_ms += (report.draft_ms + report.verify_ms) / pace
        for call in report.calls:
            if call.read > CAUGHT_UP:
                self.draft_costs.add_catch_up(call.drafter, call.read, call.ms / pace)
            else:
                self.draft_costs.add(call.drafter, call.sequences, call.levels, call.ms / pace)

    def _learn(self, item: Progress, report: Report, limits: Limits) -> None:
        sequence = item.sequence
        record: RequestRecord | None = sequence.drafting.get(RECORD)
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
            pending.expected_tokens,
            pending.expected_ms * self.costs.pace,
            pending.plain_ms * self.costs.pace,
            tree.drafted,
            item.new_tokens,
            report.draft_ms,
            report.verify_ms,
        )
        sequence.stats.decisions.append(item.decision)
        if not pending.way:
            return
        if not pending.short:
            record.add(pending.way, pending.context, len(path), tree.drafted)
        else:
            # One node was tried: what this way usually brings, times accepted over expected tokens of that node.
            usual, nodes = self.record.mean(pending.way, pending.context, model=True)
            promised = sum(v / record.tilts.get(origin, _UNTILTED).factor for origin, v in record.promised.items())
            record.add(pending.way, pending.context, usual * len(path) / promised if promised else 0.0, nodes)
        if drafted:
            accepted: dict[str, int] = {}
            for node in path:
                origin = tree.origins[node] or ""
                accepted[origin] = accepted.get(origin, 0) + 1
            for origin, promised in record.promised.items():
                record.tilts.setdefault(origin, Tilt()).add(promised, accepted.get(origin, 0))
        if not limits.clock:
            return
        if not pending.short:
            self.record.add(pending.way, pending.context, len(path), tree.drafted)
        if drafted:
            self.worth.add_tree(tree, path, pending.context.temp_class)
        if pending.probe:
            # A pass that met a busy moment is no fault of the draft: it counts with what such passes cost.
            curve = self.costs.curve(len(report.progress), len(sequence.tokens))
            ms = report.draft_ms / self.costs.pace + min(report.verify_ms / self.costs.pace, curve[report.rows])
            missing = pending.chosen_tokens - 1 - len(path)  # tokens fewer than the chosen way promised
            self._probes.ended(pending.way, ms - pending.expected_ms + missing / pending.rate)

    # -- between runs -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return {
            "passes": self.costs.state(),
            "drafts": self.draft_costs.state(self.costs.pace),
            "worth": self.worth.state(),
            "record": self.record.state(),
            **({} if self.rounds is None else {"rounds": self.rounds.forecast.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier run learnt. Costs are absent from what is shipped: they are this machine's."""
        self.worth.restore(state["worth"])
        self.record.restore(state["record"])
        if "passes" in state:
            self.costs.restore(state["passes"])
            self.draft_costs.restore(state["drafts"])
        if self.rounds is not None and "rounds" in state:
            self.rounds.forecast.restore(state["rounds"])
