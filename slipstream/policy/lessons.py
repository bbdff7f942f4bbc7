"""What a step of the host teaches about each of its sequences."""

from __future__ import annotations

from slipstream.policy.calibration import Tilt
from slipstream.policy.knowledge import Knowledge
from slipstream.policy.record import Pending, RequestRecord
from slipstream.policy.report import Progress, Report
from slipstream.types import Decision

_UNTILTED = Tilt()


def learn(
    item: Progress, report: Report, record: RequestRecord, pending: Pending, known: Knowledge, *, shared: bool
) -> None:
    """Learn what was accepted of a planned step. `shared`: it may be used for other requests."""
    assert item.verified is not None
    tree, path = item.verified
    pace = known.costs.pace
    item.decision = Decision(
        pending.way,
        pending.probe,
        pending.matched,
        pending.expected_tokens,
        pending.expected_ms * pace,
        pending.plain_ms * pace,
        tree.drafted,
        item.new_tokens,
        report.draft_ms,
        report.verify_ms,
    )
    item.sequence.stats.decisions.append(item.decision)
    drafted = len(tree) > 1
    if not pending.way or (pending.probe and not drafted):
        return
    if pending.short:
        # One node was tried: the usual acceptance of this way, times accepted over expected tokens of that node.
        usual, nodes = known.record.mean(pending.way, pending.context, model=pending.model)
        promised = sum(v / record.tilts.get(origin, _UNTILTED).factor for origin, v in record.promised.items())
        record.add(pending.way, pending.context, usual * len(path) / promised if promised else 0.0, nodes)
    else:
        record.add(pending.way, pending.context, len(path), tree.drafted)
        if shared:
            known.record.add(pending.way, pending.context, len(path), tree.drafted)
    if not drafted:
        return
    accepted: dict[str, int] = {}
    for node in path:
        origin = tree.origins[node] or ""
        accepted[origin] = accepted.get(origin, 0) + 1
    for origin, value in record.promised.items():
        record.tilts.setdefault(origin, Tilt()).add(value, accepted.get(origin, 0))
    if shared:
        known.worth.add_tree(tree, path, pending.context.temp_class)


def lost_by_try(item: Progress, report: Report, pending: Pending, known: Knowledge) -> float:
    """Milliseconds that a try has lost against the chosen way.

    The pass counts with the usual cost of such passes: that other programs slowed it down is no fault of the draft.
    """
    assert item.verified is not None
    ms = report.draft_ms / known.costs.pace + known.curve([each.sequence for each in report.progress])[report.rows]
    missing = pending.chosen_tokens - 1 - len(item.verified[1])  # tokens fewer than the chosen way promised
    return ms - pending.expected_ms + missing / pending.rate
