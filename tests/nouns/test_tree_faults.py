"""A tree that was tampered with is found by its check, or the tampering changes nothing that is verified."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.attention import tree_segment
from slipstream.cache import PageTable
from slipstream.errors import DraftFault
from slipstream.tree import Draw, Prepared, TokenTree
from slipstream.tree_check import MOST_NODES
from slipstream.verify.match import Match
from tests.nouns.test_tree import ROOT_TOKEN, VOCABULARY, build, fixed, node_choices, with_draws
from tests.tiny import tiny_llm

COLUMNS = ("tokens", "parents", "depths", "origins", "confidence", "scouts", "draws")


class Says:
    """A target that chooses by node alone."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices

    def choose(self, node: int) -> int:
        return self.choices[node % len(self.choices)]


def rebuilt(tree: TokenTree) -> TokenTree:
    """The same nodes, added one by one."""
    fresh = TokenTree(tree.tokens[0])
    for node in range(1, len(tree)):
        fresh.add(
            tree.parents[node],
            tree.tokens[node],
            origin=tree.origins[node],
            confidence=tree.confidence[node],
            draw=tree.draws[node],
            scout=tree.scouts[node],
        )
    return fresh


def columns(tree: TokenTree) -> list[list[Any]]:
    return [list(getattr(tree, name)) for name in COLUMNS]


def kinds(tree: TokenTree) -> list[list[type]]:
    return [[type(item) for item in column] for column in columns(tree)]


EVEN = torch.full((VOCABULARY,), 1 / VOCABULARY)
NUMBERS = [-2, -1, 0, 1, 2, 3, 4, 7, 2**70, 0.0, 0.5, 1.0, 1.5, 2.0, float("nan"), float("inf")]
OTHERS = [True, False, None, "x", np.int64(1), np.float64(0.5), np.bool_(True), torch.tensor(1), object(), [], (0, 1)]
ITEMS = st.sampled_from([*NUMBERS, *OTHERS, Draw(EVEN), Draw(EVEN.numpy()), Draw("nonsense")])


def tamper(tree: TokenTree, data: st.DataObject) -> None:
    """Change one thing that no drafter should touch."""
    name = data.draw(st.sampled_from([*COLUMNS, "child"]))
    column = getattr(tree, f"_{name}")
    how = data.draw(st.sampled_from(["set", "drop", "append", "swap", "replace"]))
    if how == "replace":
        setattr(tree, f"_{name}", data.draw(st.sampled_from([None, (), [], {}, tuple(column), range(len(column)), 3])))
    elif name == "child":
        key = data.draw(st.tuples(st.integers(-1, len(tree)), st.integers(-1, VOCABULARY)))
        if how == "drop" and column:
            column.pop(data.draw(st.sampled_from(sorted(column))))
        else:
            column[key] = data.draw(st.one_of(st.integers(-1, len(tree)), ITEMS))
    elif how == "drop":
        column.pop(data.draw(st.integers(0, len(column) - 1)))
    elif how == "append":
        column.append(data.draw(ITEMS))
    elif how == "swap":
        one, other = (data.draw(st.integers(0, len(column) - 1)) for _ in range(2))
        column[one], column[other] = column[other], column[one]
    else:
        column[data.draw(st.integers(0, len(column) - 1))] = data.draw(ITEMS)


@settings(fixed, max_examples=1500)
@given(node_choices, st.booleans(), st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), st.data())
def test_what_the_check_lets_pass_is_the_tree_that_adding_its_nodes_makes(
    choices: list, sampled: bool, says: list[int], data: st.DataObject
) -> None:
    tree = with_draws(choices) if sampled else build(choices)
    for _ in range(data.draw(st.integers(0, 2))):
        tree.add(data.draw(st.integers(0, len(tree) - 1)), 1, scout=True)
    for _ in range(data.draw(st.integers(1, 2))):
        try:
            tamper(tree, data)
        except (TypeError, AttributeError):  # the second tampering found nothing left to tamper with
            break
    try:
        tree.check(ROOT_TOKEN, VOCABULARY)
    except DraftFault as fault:
        assert "\n" not in str(fault)
        return
    fresh = rebuilt(tree)
    assert columns(tree) == columns(fresh) and kinds(tree) == kinds(fresh)
    assert [tree.path(node) for node in range(len(tree))] == [fresh.path(node) for node in range(len(fresh))]
    target: Any = Says(says)
    assert Match()(tree, target) == Match()(fresh, target)
    ours, theirs = (tree_segment(PageTable([0]), 3, [5, ROOT_TOKEN], grown) for grown in (tree, fresh))
    assert ours.tokens == theirs.tokens and np.array_equal(ours.visible, theirs.visible)
    assert np.array_equal(ours.positions, theirs.positions)


# -- each hole that was found, by name --------------------------------------------------------------------------------


@functools.cache
def engine(verifier: str) -> LLM:
    return tiny_llm(verifier=verifier)


def grown() -> TokenTree:
    tree = TokenTree(ROOT_TOKEN)
    node = tree.add(0, 1, origin="here", confidence=0.9)
    tree.add(node, 2, origin="here", confidence=0.5)
    tree.add(0, 3, origin="here", confidence=0.1)
    tree.check(ROOT_TOKEN, VOCABULARY)
    return tree


HOLES = {
    "a float token": ("_tokens", 1, 1.0),
    "a numpy token": ("_tokens", 1, np.int64(1)),
    "a parent ahead": ("_parents", 1, 2),
    "a parent that is itself": ("_parents", 2, 2),
    "a parent before the root": ("_parents", 1, -1),
    "a root with a parent": ("_parents", 0, 1),
    "another depth": ("_depths", 2, 1),
    "a child of another token": ("_tokens", 1, 2),
    "a confidence that is no number": ("_confidence", 1, float("nan")),
    "an origin that is not an id": ("_origins", 1, 7),
    "a scout that is no flag": ("_scouts", 1, 1),
    "a draw that is none": ("_draws", 1, "q"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_what_the_check_missed_is_found(hole: str) -> None:
    column, node, item = HOLES[hole]
    tree = grown()
    getattr(tree, column)[node] = item
    with pytest.raises(DraftFault):
        tree.check(ROOT_TOKEN, VOCABULARY)


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("hole", HOLES)
def test_a_request_continues_as_if_nothing_had_been_drafted(
    hole: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, node, item = HOLES[hole]
    llm = engine(verifier)
    llm.use(None)
    how = SamplingParams(seed=3, max_tokens=6)
    (expected,) = llm.generate([[1, 2, 3]], how)
    llm.use("suffix")

    def tampered(requests: Any) -> list[TokenTree]:
        tree = TokenTree(requests[0].sequence.tokens[-1])
        tree.add(tree.add(0, 1), 2)
        tree.add(0, 3)
        getattr(tree, column)[node] = item
        return [tree]

    monkeypatch.setattr(llm.drafter, "propose", tampered)
    (output,) = llm.generate([[1, 2, 3]], how)
    assert output.stats.draft_faults == 1 and output.token_ids == expected.token_ids


@pytest.mark.parametrize("column", COLUMNS)
def test_a_short_column_is_found(column: str) -> None:
    tree = grown()
    getattr(tree, f"_{column}").pop()
    with pytest.raises(DraftFault, match="length"):
        tree.check(ROOT_TOKEN, VOCABULARY)


def test_a_wrong_index_of_children_is_found() -> None:
    tree = grown()
    tree._child[0, 2] = tree._child.pop((0, 1))
    with pytest.raises(DraftFault, match="children"):
        tree.check(ROOT_TOKEN, VOCABULARY)


def test_a_token_that_occurs_twice_below_a_node_is_found() -> None:
    tree = grown()
    tree._tokens[3] = 1
    tree._child = {(0, 1): 3, (1, 2): 2}  # what such tokens would give
    with pytest.raises(DraftFault, match="same token"):
        tree.check(ROOT_TOKEN, VOCABULARY)


def test_the_columns_cannot_be_set() -> None:
    tree = grown()
    for name in COLUMNS:
        with pytest.raises(AttributeError):
            setattr(tree, name, [])


@pytest.mark.parametrize("token", [1.0, "1", None, np.float64(1.0), torch.tensor(1.0)])
def test_a_token_that_is_no_whole_number_is_refused_where_it_is_added(token: Any) -> None:
    with pytest.raises(DraftFault, match="whole number"):
        TokenTree(ROOT_TOKEN).add(0, token)
    with pytest.raises(DraftFault, match="whole number"):
        TokenTree(token)
    with pytest.raises(DraftFault, match="whole number"):
        TokenTree(ROOT_TOKEN).add(token, 1)


@pytest.mark.parametrize("token", [np.int32(2), np.int64(2), torch.tensor(2)])
def test_other_whole_numbers_become_plain_ones(token: Any) -> None:
    tree = TokenTree(token)
    node = tree.add(np.int64(0), token, confidence=np.float32(0.5))  # type: ignore[arg-type]
    tree.check(2, VOCABULARY)
    assert kinds(tree)[:3] == [[int, int]] * 3 and type(tree.confidence[node]) is float
    assert tree.child(0, 2) == node


def test_a_tree_does_not_grow_for_ever() -> None:
    with pytest.raises(DraftFault, match=f"{MOST_NODES} nodes"):
        TokenTree.chain(ROOT_TOKEN, (token % VOCABULARY for token in range(MOST_NODES + 1)))


@pytest.mark.parametrize(
    "q",
    [
        np.full(VOCABULARY, 1 / VOCABULARY),
        [1 / VOCABULARY] * VOCABULARY,
        torch.full((1, VOCABULARY), 1 / VOCABULARY),
        torch.full((VOCABULARY,), float("nan")),
        torch.ones(VOCABULARY),
        torch.tensor([0.5, 0.0, 0.5, 0.0]),  # a token that could not have been drawn
        torch.tensor([-0.5, 0.5, 0.5, 0.5]),
        torch.full((VOCABULARY,), 1 / VOCABULARY).to_sparse(),
        torch.tensor([0, 1, 0, 0]),
    ],
    ids=["numpy", "list", "two dimensions", "nan", "not normalised", "no mass", "negative", "sparse", "whole numbers"],
)
def test_a_q_that_verifiers_cannot_read_is_found(q: Any) -> None:
    tree = TokenTree(ROOT_TOKEN)
    tree.add(0, 1, draw=Draw(q))
    with pytest.raises(DraftFault, match="q"):
        tree.check(ROOT_TOKEN, VOCABULARY)


def test_preparation_of_another_tree_is_found() -> None:
    tree = grown()
    tree.prepared = Prepared(1, torch.zeros(len(tree), 8))
    tree.check(ROOT_TOKEN, VOCABULARY)
    tree.prepared = Prepared(1, torch.zeros(len(tree) - 1, 8))
    with pytest.raises(DraftFault, match="prepared"):
        tree.check(ROOT_TOKEN, VOCABULARY)
