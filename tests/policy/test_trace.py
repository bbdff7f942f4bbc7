"""Costs, calibration and choice on a recorded trace: learnt from every other step, judged by the rest.

`tests/policy/record_trace.py` recorded it: SmolLM2-135M in 8 bits, on one thread of an EPYC with AVX-512.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from slipstream.policy.calibration import Calibration
from slipstream.policy.choice import best_count
from slipstream.policy.costs import DraftCosts, PassCosts, pass_shape
from slipstream.tree import TokenTree

_CAUGHT_UP = 8


class Tried(NamedTuple):
    """A verified tree."""

    temp_class: int
    tree: TokenTree
    path: list[int]


class Step(NamedTuple):
    """One step of the trace."""

    context: int
    rows: int
    draft_ms: float
    verify_ms: float
    calls: list[Any]
    trees: list[Tried]


def read_trace(overstated: float = 1.0) -> list[Step]:
    """`overstated`: below 1, drafters state more confidence than they did."""
    steps = []
    for step in json.loads((Path(__file__).parent / "trace.json").read_text()):
        trees = []
        for temp_class, parents, origins, confidence, path in step.pop("trees"):
            tree = TokenTree(0)
            for node in range(1, len(parents)):
                tree.add(parents[node], node, origin=origins[node], confidence=confidence[node] ** overstated)
            trees.append(Tried(temp_class, tree, path))
        steps.append(Step(**step, trees=trees))
    return steps


TRACE = read_trace()
LESSONS, REST = TRACE[::2], TRACE[1::2]


def learnt(lessons: list[Step] = LESSONS) -> tuple[PassCosts, DraftCosts, Calibration]:
    """What the lessons teach."""
    passes, drafts, worth = PassCosts(pass_shape(20, lambda rows: 1.0)), DraftCosts(), Calibration()
    for step in lessons:
        passes.add(len(step.trees), step.context, step.rows, step.verify_ms)
        for label, levels, ms, read, short in step.calls:
            if read <= _CAUGHT_UP:
                drafts.add(label, len(step.trees), levels, ms, short=short)
        for tried in step.trees:
            worth.add_tree(tried.tree, tried.path, tried.temp_class)
    return passes, drafts, worth


def test_costs_of_passes_are_foreseen() -> None:
    passes, _, _ = learnt()
    seen = defaultdict[tuple[int, int], list[Step]](list)
    for step in REST:
        seen[len(step.trees), step.rows].append(step)
    groups = {place: steps for place, steps in seen.items() if len(steps) >= 5}
    assert len(groups) >= 6
    for (count, rows), steps in groups.items():
        foreseen = median(passes.pace * passes.curve(count, step.context)[rows] for step in steps)
        assert foreseen == pytest.approx(median(step.verify_ms for step in steps), rel=0.1), (count, rows)


def test_costs_of_drafts_are_foreseen() -> None:
    _, drafts, _ = learnt()
    calls = [call for step in REST if len(step.trees) == 1 for call in step.calls]
    whole = [ms for label, _, ms, read, short in calls if label == "eagle3" and read <= _CAUGHT_UP and not short]
    assert len(whole) >= 30
    assert drafts.call("eagle3", 1, 0.6) == pytest.approx(median(whole), rel=0.2)


def error_of(worth: Calibration, rest: list[Step]) -> float:
    """How far the stated probabilities of nodes are from the share that was accepted, on average over nodes."""
    bins = defaultdict[int, list[tuple[float, bool]]](list)
    for step in rest:
        for temp_class, tree, path in step.trees:
            survivals, accepted = worth.survivals(tree, temp_class, {}), {0, *path}
            for node in range(1, len(tree)):
                parent = tree.parents[node]
                if parent in accepted:
                    given = survivals[node] / survivals[parent]
                    bins[min(4, int(5 * given))].append((given, node in accepted))
    total = sum(map(len, bins.values()))
    assert total >= 300
    return sum(abs(sum(p for p, _ in found) - sum(ok for _, ok in found)) for found in bins.values()) / total


@pytest.mark.parametrize("overstated", [1.0, 0.5])
def test_confidences_become_probabilities(overstated: float) -> None:
    """Also those of a drafter that is too sure of itself."""
    trace = read_trace(overstated)
    _, _, worth = learnt(trace[::2])
    found, stated = (error_of(known, trace[1::2]) for known in (worth, Calibration()))
    assert found <= 0.09
    if overstated < 1.0:
        assert stated > 2 * found, "taken at its word"


def test_the_chosen_nodes_are_faster_than_none_and_than_all() -> None:
    """Of steps that drafted: tokens of the chosen nodes over the time of draft and pass, by measured costs."""
    passes, _, worth = learnt()
    tokens = {"chosen": 0, "all": 0, "plain": 0}
    spent = dict.fromkeys(tokens, 0.0)
    drafting = [step for step in REST if len(step.trees) == 1 and len(step.trees[0].tree) > 1]
    assert len(drafting) >= 60
    for step in drafting:
        ((temp_class, tree, path),) = step.trees
        curve = passes.curve(1, step.context)
        survivals = worth.survivals(tree, temp_class, {})
        ranked = sorted(range(1, len(tree)), key=survivals.__getitem__, reverse=True)
        count = best_count([survivals[node] for node in ranked], 1, curve, step.draft_ms)
        for name, kept in (("chosen", ranked[:count]), ("all", ranked), ("plain", [])):
            tokens[name] += 1 + len(set(kept) & set(path))
            spent[name] += curve[1 + len(kept)] + (step.draft_ms if name != "plain" else 0.0)
    rate = {name: tokens[name] / spent[name] for name in tokens}
    assert rate["chosen"] >= rate["plain"]
    assert rate["chosen"] >= 0.99 * rate["all"]
