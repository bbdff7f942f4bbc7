"""`traversal` on trees: lossless, by chi-square of whole answers and exactly; and how many tokens it keeps.

Every seed is fixed, so a case passes always or never. Were the seeds drawn afresh, a right verifier would fail one of
the 5 chi-squares (p > 1e-4 each) once in 2,000 runs. `tests/verify/test_verify_path_faults.py` plants the faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from slipstream.tree import Draw, TokenTree
from slipstream.verify import Match, Rejection, Traversal, Verdict
from tests.verify.outcomes import (
    Numbered,
    Shape,
    continuation,
    distribution,
    levels,
    mean_accepted,
    outcomes,
    random_tables,
    small_tables,
    step_law,
)
from tests.verify.tables import (
    LONGEST,
    Prefix,
    TableDrafter,
    Tables,
    decode,
    draft_tables,
    exact_joint,
    p_value,
    target_tables,
)

pytestmark = pytest.mark.slow

PASSES = 1e-4
few = settings(derandomize=True, deadline=None, max_examples=10)


@pytest.fixture(autouse=True, scope="module")
def as_the_engine_does() -> Iterator[None]:
    with torch.inference_mode():
        yield


# -- lossless ---------------------------------------------------------------------------------------------------------


class Alternating(TableDrafter):
    """Siblings are chosen after one or three tokens, and drawn elsewhere."""

    def _row(self, prefix: Prefix) -> tuple[Draw, list[float], list[int]]:
        self.chosen = len(prefix) % 2 == 1
        return super()._row(prefix)


SHAPES = {"pairs": {"depth": 2, "branch": 2, "nodes": 6}, "triples": {"depth": 2, "branch": 3, "nodes": 5}}
CASES = [
    ("pairs", "good", 0.0, "drawn"),
    ("pairs", "bad", 0.2, "drawn"),
    ("triples", "adversarial", 0.4, "drawn"),
    ("triples", "equal", 0.2, "drawn"),
    ("pairs", "bad", 0.2, "drawn and chosen"),
]


@pytest.mark.parametrize(("shape", "quality", "zeros", "kind"), CASES)
def test_answers_follow_the_targets_distribution(shape: str, quality: str, zeros: float, kind: str) -> None:
    case = CASES.index((shape, quality, zeros, kind))
    target = target_tables(2100 + case, zeros)
    made = TableDrafter if kind == "drawn" else Alternating
    drafter = made(draft_tables(target, quality, 2200 + case), **SHAPES[shape])
    answers = decode(Traversal(), target, drafter, seed=80_000_000 + 1_000_000 * case)
    assert p_value(answers, exact_joint(target)) > PASSES


def by_kind(*kinds: bool) -> Shape:
    """Two children everywhere; whether they are chosen differs by level."""
    return lambda path: (2 * (len(path) < len(kinds)), len(path) < len(kinds) and kinds[len(path)])


EXACT: dict[str, Shape] = {
    "chain": levels(1, 1),
    "pairs": levels(2, 2),
    "all, then one": levels(3, 1),
    "one, then all": levels(1, 3),
    "chosen": levels(2, 2, chosen=True),
    "drawn, then chosen": by_kind(False, True),
    "chosen, then drawn": by_kind(True, False),
    "as many as the token says": lambda path: (2 if not path else path[0] if len(path) == 1 else 0, False),
    "a tree for one token, a chain for others": lambda path: (0 if len(path) > 1 else 1 + (path == (0,)), False),
}


@pytest.mark.parametrize("shape", EXACT)
def test_a_step_says_exactly_what_the_target_would(shape: str) -> None:
    @few
    @given(small_tables(2), small_tables(1))
    def holds(target: Tables, drafts: Tables) -> None:
        law = step_law(Traversal(), target, drafts, EXACT[shape], 3)
        np.testing.assert_allclose(law, continuation(target, (), 3), atol=1e-14)

    holds()


def test_a_scout_is_never_accepted() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, scout=True)
    drafted = tree.add(0, 2)
    tree.add(drafted, 0, scout=True)
    target = {(): distribution(0, 9, 1), (2,): distribution(1, 0, 0)}
    found = outcomes(Traversal(), tree, target)
    assert {tuple(outcome.nodes): outcome.probability for outcome in found} == pytest.approx({(drafted,): 0.1, (): 0.9})


# -- how many tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [levels(2, 1), levels(3, 1), levels(1, 1, 1)])
def test_never_fewer_tokens_than_rejection_where_only_the_root_branches(shape: Shape) -> None:
    @few
    @given(small_tables(3), small_tables(2))
    def holds(target: Tables, drafts: Tables) -> None:
        ours, theirs = (mean_accepted(verifier, target, drafts, shape) for verifier in (Traversal(), Rejection()))
        assert ours >= theirs - 1e-12

    holds()


def test_more_tokens_than_rejection_on_trees_that_branch_everywhere() -> None:
    gains = []
    for seed in range(5):
        target, drafts = random_tables(2, 2300 + seed), random_tables(1, 2400 + seed)
        ours, theirs = (mean_accepted(v, target, drafts, levels(2, 2)) for v in (Traversal(), Rejection()))
        gains.append(ours / theirs)
    assert min(gains) >= 1.0 and float(np.mean(gains)) > 1.005


def test_a_tree_on_which_rejection_keeps_more() -> None:
    """Below the root, siblings that are drawn for a node of weight under 1 may pay less than `rejection` would ask."""
    target = {(): distribution(9, 1, 0, 0), (0,): distribution(1, 1, 6, 2)}
    target |= {(0, token): distribution(1, 1, 1, 1) for token in range(4)}
    drafts = {(): distribution(1, 0, 0, 0), (0,): distribution(1, 7, 2, 0)}
    ours, theirs = (mean_accepted(v, target, drafts, levels(1, 2)) for v in (Traversal(), Rejection()))
    assert theirs - ours == pytest.approx(0.00326, abs=1e-5)


@few
@given(small_tables(2), small_tables(1))
def test_chosen_nodes_are_accepted_as_often_as_the_target_says_them(target: Tables, drafts: Tables) -> None:
    """No rule can do better with guesses, and `rejection` does as well."""
    shape = levels(2, 2, chosen=True)
    ours, theirs = (mean_accepted(verifier, target, drafts, shape) for verifier in (Traversal(), Rejection()))
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_the_target_as_its_own_draft_is_accepted_to_a_leaf() -> None:
    target = target_tables(2500)
    drafter = TableDrafter(target, depth=3, branch=2, nodes=14)

    def leaf(prefix: Prefix, tree: TokenTree, verdict: Verdict) -> None:
        assert len(verdict.nodes) == min(3, LONGEST - len(prefix)) and verdict.nodes[0] == 1

    decode(Traversal(), target, drafter, 90_000_000, samples=500, see=leaf)


# -- the same as others where it should be ----------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True])
def test_greedy_is_match(chosen: bool) -> None:
    sampled = target_tables(2600)
    greedy = {path: torch.nn.functional.one_hot(p.argmax(), len(p)).double() for path, p in sampled.items()}
    drafter = TableDrafter(sampled, depth=3, branch=2, nodes=14, chosen=chosen)
    kept: dict[str, list[tuple[list[int], list[int]]]] = {"traversal": [], "match": []}
    for verifier in (Traversal(), Match()):
        decode(
            verifier, greedy, drafter, 91_000_000, 300,
            see=lambda path, tree, verdict, name=verifier.name: kept[name].append((verdict.nodes, verdict.tokens)),
        )  # fmt: skip
    assert kept["traversal"] == kept["match"]
    assert max(len(nodes) for nodes, _ in kept["match"]) == 3


def test_nothing_is_requested_below_what_cannot_be_accepted() -> None:
    """Neither below a token of no probability, nor after a leaf that falls."""
    target = {(): distribution(0, 1, 0), (1,): distribution(0, 0, 1), (1, 2): distribution(1, 0, 0)}
    tree = TokenTree(0)
    for token in (0, 1, 2):
        node = tree.add(0, token)
        for below in (1, 2):
            tree.add(node, below)
    asked = Numbered(target, tree)
    assert Traversal()(tree, asked).tokens == [1, 2, 0]
    assert sorted(tuple(tree.path_tokens(node)) for node in asked.nodes) == [(), (1,), (1, 2)]
