"""Trees from marginals: the best of their size, compared with all trees."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.drafters.growing.marginals import best_first
from slipstream.drafters.growing.static_tree import RANKS, RankTally, StaticTree

Path = tuple[int, ...]


def paths(nodes: list[tuple[int, int, float]]) -> list[Path]:
    """Each node as the tokens (or ranks) from the root down to it."""
    found: list[Path] = [()]
    for parent, token, _ in nodes:
        found.append((*found[parent], token))
    return found[1:]


def worth(path: Path, accuracies: list[list[float]]) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= accuracies[depth][rank]
    return product


def best_by_trying(accuracies: list[list[float]], nodes: int, branch: int) -> float:
    """The largest sum over all connected trees of that many nodes, each built in every possible order."""
    trees: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes):
        larger = set()
        for tree in trees:
            for parent in (*tree, ()):
                if len(parent) == len(accuracies) or sum(p[:-1] == parent for p in tree if p) == branch:
                    continue
                for rank in range(len(accuracies[len(parent)])):
                    if (*parent, rank) not in tree:
                        larger.add(tree | {(*parent, rank)})
        trees = larger or trees
    return max(sum(worth(path, accuracies) for path in tree) for tree in trees)


@pytest.mark.parametrize("seed", range(12))
def test_no_tree_of_the_same_size_is_right_more_often(seed: int) -> None:
    chooser = random.Random(seed)
    accuracies = [[chooser.random() ** 2 for _ in range(3)] for _ in range(3)]  # in no order: ranks may be out of turn
    for nodes in range(1, 6):
        for branch in (1, 2, 3):
            tree = StaticTree.best(accuracies, nodes, branch)
            found = paths(tree.nodes)
            assert len(set(found)) == len(found) == min(nodes, 3 if branch == 1 else nodes)
            assert max(sum(p[:-1] == parent for p in found) for parent in ((), *found)) <= branch
            odds = [worth(path, accuracies) for path in found]
            assert odds == pytest.approx([odd for _, _, odd in tree.nodes])
            assert sum(odds) == pytest.approx(best_by_trying(accuracies, nodes, branch))


def test_the_trees_of_all_sizes_are_nested() -> None:
    accuracies = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.05]]
    whole = StaticTree.best(accuracies, 30, 3).nodes
    assert len(whole) == 30
    for nodes in range(30):
        assert StaticTree.best(accuracies, nodes, 3).nodes == whole[:nodes]


def test_what_is_never_right_gets_no_node() -> None:
    assert paths(StaticTree.best([[0.5, 0.0], [0.0, 0.0], [0.9, 0.9]], 10, 2).nodes) == [(0,)]


def test_children_are_counted_by_their_places() -> None:
    # Rank 1 is right more often than rank 0, so the first child has rank 1.
    tree = StaticTree.best([[0.3, 0.5], [0.6, 0.1]], 4, 2)
    assert paths(tree.nodes) == [(1,), (0,), (1, 0), (0, 0)]
    assert tree.widths == {(): 2, (0,): 1, (1,): 1}


def test_paths_under_the_confidence_are_left_out() -> None:
    nodes = best_first([[7, 8], [9]], [[0.6, 0.3], [0.5]], 10, min_confidence=0.25)
    assert nodes == [(0, 7, 0.6), (0, 8, 0.3), (1, 9, 0.3)]
    assert best_first([[7]], [[0.2]], 10, min_confidence=0.25) == []
    assert best_first([[7, 8], [9]], [[0.6, 0.3], [0.5]], 1) == [(0, 7, 0.6)]


def test_the_tally_counts_ranks() -> None:
    tally = RankTally(2)
    choices = torch.tensor([[4, 5, 6], [4, 5, 6], [5, 4, 6]])
    assert tally.add(0, choices, torch.tensor([4, 6, 7])).tolist() == [True, True, False]
    assert tally.add(0, choices[:1], torch.tensor([4])).tolist() == [True]
    assert tally.accuracies[0][:4] == [0.5, 0.0, 0.25, 0.0]
    assert tally.accuracies[1] == [0.0] * RANKS
