"""TokenTree: structure against naive references, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import DraftFault, OptionError
from slipstream.tree import Draw, TokenTree

ROOT_TOKEN = 9
VOCABULARY = 4  # small, so that random trees share prefixes
Path = tuple[int, ...]

fixed = settings(derandomize=True, deadline=None)  # the same examples on every run, however busy the machine

confidences = st.floats(0.0, 1.0)
node_choices = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, VOCABULARY - 1), confidences), max_size=24)


def build(choices: list[tuple[int, int, float]]) -> TokenTree:
    tree = TokenTree(ROOT_TOKEN)
    for parent, token, confidence in choices:
        tree.add(parent % len(tree), token, confidence=confidence)
    return tree


def with_draws(choices: list[tuple[int, int, float]]) -> TokenTree:
    """A sampled tree: the children of a node share one draw; a repeated token is not drawn again."""
    tree = TokenTree(ROOT_TOKEN)
    draws: dict[int, Draw] = {}
    for parent, token, confidence in choices:
        node = parent % len(tree)
        if tree.child(node, token) is None:
            draw = draws.setdefault(node, Draw(torch.full((VOCABULARY,), 1 / VOCABULARY)))
            tree.add(node, token, confidence=confidence, draw=draw)
    return tree


trees = node_choices.map(build)
sampled_trees = node_choices.map(with_draws)


def paths(tree: TokenTree) -> dict[Path, float]:
    return {tuple(tree.path_tokens(node)): tree.confidence[node] for node in range(1, len(tree))}


def ancestors(tree: TokenTree, node: int) -> set[int]:
    found = {node}
    while tree.parents[node] >= 0:
        node = tree.parents[node]
        found.add(node)
    return found


# -- structure --------------------------------------------------------------------------------------------------------


@fixed
@given(trees)
def test_masks_paths_depths_and_children_agree_with_naive_ones(tree: TokenTree) -> None:
    mask = tree.ancestor_mask()
    assert mask.shape == (len(tree), len(tree)) and mask.dtype == np.bool_
    for node in range(len(tree)):
        above = ancestors(tree, node)
        assert set(np.flatnonzero(mask[node])) == above
        assert tree.path(node) == sorted(above - {0})
        assert tree.depths[node] == len(above) - 1
        assert tree.children(node) == [n for n in range(len(tree)) if tree.parents[n] == node]
        assert all(tree.child(node, tree.tokens[child]) == child for child in tree.children(node))
    assert tree.depth == max(len(p) for p in [(), *paths(tree)])
    assert tree.drafted == len(tree) - 1
    assert len(paths(tree)) == len(tree) - 1, "two nodes spell the same path"


@fixed
@given(trees, st.lists(st.integers(0, VOCABULARY - 1), max_size=8))
def test_walk_spells_the_longest_beginning_that_is_there(tree: TokenTree, tokens: list[int]) -> None:
    known = {(), *paths(tree)}
    longest = max(n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in known)
    nodes = tree.walk(tokens)
    assert len(nodes) == longest
    assert [tree.tokens[n] for n in nodes] == tokens[:longest]
    assert nodes == (tree.path(nodes[-1]) if nodes else [])


@fixed
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
def test_a_chain_is_a_tree(tokens: list[int]) -> None:
    chain = TokenTree.chain(ROOT_TOKEN, tokens, origin="here")
    assert chain.tokens == [ROOT_TOKEN, *tokens]
    assert chain.parents == list(range(-1, len(tokens)))
    assert chain.origins == [None, *["here"] * len(tokens)]
    assert chain.ancestor_mask().sum() == (len(tokens) + 1) * (len(tokens) + 2) // 2


def test_adding_a_chosen_child_again_keeps_one_node_and_the_higher_confidence() -> None:
    tree = TokenTree(ROOT_TOKEN)
    node = tree.add(0, 1, confidence=0.3)
    assert tree.add(0, 1, confidence=0.7) == tree.add(0, 1, confidence=0.2) == node
    assert len(tree) == 2 and tree.confidence[node] == 0.7


def test_scouts_are_verified_and_never_accepted() -> None:
    tree = TokenTree(ROOT_TOKEN)
    scout = tree.add(0, 1, scout=True)
    assert tree.child(0, 1) is None and tree.children(0) == [] and tree.walk([1]) == [] and tree.drafted == 0
    node = tree.add(0, 1)
    assert node != scout and tree.child(0, 1) == node and tree.drafted == 1
    tree.check(ROOT_TOKEN, VOCABULARY)
    tree.add(scout, 2)
    with pytest.raises(DraftFault, match="scout"):
        tree.check(ROOT_TOKEN, VOCABULARY)


# -- merge ------------------------------------------------------------------------------------------------------------


@fixed
@given(node_choices, node_choices)
def test_merge_is_the_union_of_paths_in_any_order(left: list, right: list) -> None:
    one, other = build(left), build(right)
    expected = dict(paths(one))
    for path, confidence in paths(other).items():
        expected[path] = max(confidence, expected.get(path, 0.0))
    one.merge(build(right))
    other.merge(build(left))
    assert paths(one) == paths(other) == expected
    one.check(ROOT_TOKEN, VOCABULARY)


@fixed
@given(node_choices, node_choices)
def test_merge_is_idempotent_and_keeps_node_numbers(left: list, right: list) -> None:
    tree = build(left)
    tokens, parents = list(tree.tokens), list(tree.parents)
    tree.merge(build(left))
    assert (tree.tokens, tree.parents) == (tokens, parents)
    tree.merge(build(right))
    assert (tree.tokens[: len(tokens)], tree.parents[: len(tokens)]) == (tokens, parents)


def test_merge_refuses_another_root() -> None:
    with pytest.raises(DraftFault, match="root"):
        TokenTree(1).merge(TokenTree(2))


@fixed
@given(sampled_trees.filter(lambda tree: len(tree) > 1), trees)
def test_sampled_nodes_are_never_merged(sampled: TokenTree, chosen: TokenTree) -> None:
    for one, other in ((sampled, chosen), (chosen, sampled)):
        before = (list(one.tokens), list(one.parents))
        with pytest.raises(OptionError, match="merged"):
            one.merge(other)
        assert (one.tokens, one.parents) == before


# -- fewer nodes ------------------------------------------------------------------------------------------------------


@fixed
@given(trees, st.integers(0, 24))
def test_pruning_keeps_the_best_nodes_and_their_ancestors(tree: TokenTree, budget: int) -> None:
    smaller = tree.pruned(budget)
    whole = paths(tree)
    kept = paths(smaller)
    # A path is worth its weakest node: a good node below a bad one cannot be reached without the bad one.
    worth = {path: min(whole[path[:n]] for n in range(1, len(path) + 1)) for path in whole}
    assert len(kept) == min(budget, len(whole))
    assert all(path[:-1] in kept or len(path) == 1 for path in kept), "a node lost its parent"
    assert kept.items() <= whole.items()
    if kept and len(kept) < len(whole):
        assert min(worth[p] for p in kept) >= max(worth[p] for p in whole.keys() - kept.keys())
    smaller.check(ROOT_TOKEN, VOCABULARY)


@fixed
@given(trees)
def test_pruning_breaks_ties_by_the_earlier_node(tree: TokenTree) -> None:
    level = build([(parent, token, 0.5) for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True)])
    for budget in range(len(level)):
        assert level.pruned(budget).tokens == level.tokens[: budget + 1]


@fixed
@given(sampled_trees.filter(lambda tree: len(tree) > 1))
def test_sampled_nodes_are_never_pruned(tree: TokenTree) -> None:
    assert tree.pruned(len(tree) - 1) is tree, "nothing to prune, nothing to refuse"
    with pytest.raises(DraftFault, match="pruned"):
        tree.pruned(len(tree) - 2)


@fixed
@given(st.one_of(trees, sampled_trees), st.integers(0, 6))
def test_truncating_looks_at_depth_alone(tree: TokenTree, depth: int) -> None:
    smaller = tree.truncated(depth)
    assert paths(smaller) == {path: c for path, c in paths(tree).items() if len(path) <= depth}
    for node in range(len(smaller)):
        twin = tree.walk(smaller.path_tokens(node))[-1] if node else 0
        assert smaller.draws[node] is tree.draws[twin]
    smaller.check(ROOT_TOKEN, VOCABULARY)


@fixed
@given(st.one_of(trees, sampled_trees), st.integers(0, 6), st.integers(0, 24))
def test_both_limits_in_one_go_are_the_one_after_the_other(tree: TokenTree, depth: int, nodes: int) -> None:
    truncated = tree.truncated(depth)
    if tree.sampled and len(truncated) - 1 > nodes:
        with pytest.raises(DraftFault, match="sampled"):
            tree.limited(depth, nodes)
        return
    both = tree.limited(depth, nodes)
    after = truncated if truncated.sampled else truncated.pruned(nodes)
    assert (both.tokens, both.parents, both.confidence) == (after.tokens, after.parents, after.confidence)
    assert both is tree or len(both) < len(tree), "a tree within its limits is not made again"
    both.check(ROOT_TOKEN, VOCABULARY)


@fixed
@given(trees, st.lists(st.tuples(confidences, st.integers(0, 10_000), st.integers(0, 3)), max_size=12), st.data())
def test_the_best_of_nodes_and_leaves_are_those_of_the_tree_that_has_all(
    tree: TokenTree, choices: list[tuple[float, int, int]], data: st.DataObject
) -> None:
    leaves: dict[tuple[int, int], tuple[float, int, int]] = {}
    for joint, place, token in choices:
        if tree.child(place % len(tree), token) is None:
            leaves.setdefault((place % len(tree), token), (joint, place % len(tree), token))
    budget = data.draw(st.integers(0, len(tree) + len(leaves)))
    before = list(tree.tokens)
    best = tree.best_with(list(leaves.values()), budget, origin="leaf")
    whole = TokenTree(ROOT_TOKEN)
    whole.merge(tree)
    for joint, parent, token in leaves.values():
        whole.add(parent, token, origin="leaf", confidence=joint)
    expected = whole.pruned(budget)
    assert tree.tokens == before and best is not tree
    for name in ("tokens", "parents", "confidence", "origins"):
        assert getattr(best, name) == getattr(expected, name)
    best.check(ROOT_TOKEN, VOCABULARY)


@fixed
@given(st.one_of(trees, sampled_trees))
def test_a_copy_is_equal_and_its_own(tree: TokenTree) -> None:
    twin = tree.copy()
    assert (twin.tokens, twin.parents, twin.draws) == (tree.tokens, tree.parents, tree.draws)
    size = len(tree)
    tree.add(0, 7, confidence=0.5)
    assert len(twin) == size
    twin.check(ROOT_TOKEN, VOCABULARY)


# -- what is refused --------------------------------------------------------------------------------------------------


@fixed
@given(sampled_trees)
def test_right_trees_pass_the_check(tree: TokenTree) -> None:
    tree.check(ROOT_TOKEN, VOCABULARY)
    with pytest.raises(DraftFault, match="root"):
        tree.check(ROOT_TOKEN + 1, VOCABULARY)


@fixed
@given(trees, st.data())
def test_one_bad_number_anywhere_is_found(tree: TokenTree, data: st.DataObject) -> None:
    parent = data.draw(st.integers(0, len(tree) - 1))
    if data.draw(st.booleans()):
        tree.add(parent, data.draw(st.sampled_from([-1, VOCABULARY, VOCABULARY + 7, 2**40])))
        match = "outside the vocabulary"
    else:
        node = tree.add(parent, 0)
        tree._confidence[node] = data.draw(st.sampled_from([float("nan"), -0.1, 1.1, float("inf")]))
        match = "confidence"
    for _ in range(data.draw(st.integers(0, 3))):
        tree.add(data.draw(st.integers(0, len(tree) - 1)), 1)
    with pytest.raises(DraftFault, match=match):
        tree.check(ROOT_TOKEN, VOCABULARY)


def test_siblings_of_two_kinds_are_refused() -> None:
    q = torch.full((VOCABULARY,), 1 / VOCABULARY)
    for first, second in ((Draw(q), None), (None, Draw(q)), (Draw(q), Draw(q))):
        tree = TokenTree(ROOT_TOKEN)
        tree.add(0, 1, draw=first)
        tree.add(0, 2, draw=second)
        with pytest.raises(DraftFault, match="siblings"):
            tree.check(ROOT_TOKEN, VOCABULARY)


def test_a_token_drawn_twice_or_a_parent_that_is_not_there_is_refused() -> None:
    draw = Draw(torch.full((VOCABULARY,), 1 / VOCABULARY))
    tree = TokenTree(ROOT_TOKEN)
    tree.add(0, 1, draw=draw)
    for again in (draw, None):
        with pytest.raises(DraftFault, match="twice"):
            tree.add(0, 1, draw=again)
    for parent in (-1, 2):
        with pytest.raises(DraftFault, match="parent"):
            tree.add(parent, 1)
