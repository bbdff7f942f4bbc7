"""Which nodes of the drafts of a step are verified."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slipstream.policy.choice import best_count
from slipstream.policy.costs import Curve
from slipstream.policy.knowledge import Knowledge
from slipstream.policy.record import record_of
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


def selected(
    trees: Mapping[Sequence, TokenTree],
    plans: Mapping[Sequence, Plan],
    known: Knowledge,
    curve: Curve,
    rows: int,
    drafted_ms: float,
) -> dict[Sequence, TokenTree]:
    """The nodes of all trees that are worth their rows.

    `rows`: those that the pass has in any case; `drafted_ms`: the time of the drafts. A draft that is tried keeps at
    least its likeliest node: without one nothing would be learnt.
    """
    records = {sequence: record_of(sequence) for sequence in trees}
    survivals = {s: known.worth.survivals(tree, records[s].temp_class, records[s].tilts) for s, tree in trees.items()}
    ranked = sorted((value for values in survivals.values() for value in values[1:]), reverse=True)
    ranked = ranked[: sum(plans[s].nodes for s in trees)]
    best = best_count(ranked, rows, curve, drafted_ms)
    threshold = ranked[best - 1] if best else math.inf
    kept = {}
    for sequence, tree in trees.items():
        values, record, origins = survivals[sequence], records[sequence], tree.origins
        nodes = [node for node in range(1, len(values)) if values[node] >= threshold]
        likeliest = max(range(1, len(values)), key=values.__getitem__)
        if not nodes and values[likeliest] > 0.0 and record.pending is not None and record.pending.probe:
            nodes = [likeliest]
            record.pending = record.pending._replace(short=True)
        for node in nodes:
            origin = origins[node] or ""
            record.promised[origin] = record.promised.get(origin, 0.0) + values[node]
        kept[sequence] = tree if len(nodes) == len(tree) - 1 else tree.subtree([0, *nodes])
    return kept
