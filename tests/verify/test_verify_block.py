"""`block` on chains: lossless, by chi-square of whole answers and exactly; and never fewer tokens than `rejection`.

Every seed is fixed, so a case passes always or never. Were the seeds drawn afresh, a right verifier would fail one of
the 5 chi-squares (p > 1e-4 each) once in 2,000 runs. `tests/verify/test_verify_path_faults.py` plants the faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from slipstream import noise
from slipstream.tree import Draw, TokenTree
from slipstream.verify import Block, Match, Rejection, Traversal
from slipstream.verify.traversal import after_rejection, share
from tests.verify.outcomes import (
    Numbered,
    all_trees,
    continuation,
    distribution,
    levels,
    mean_accepted,
    outcomes,
    small_tables,
    step_law,
)
from tests.verify.tables import (
    Prefix,
    Randomness,
    TableDrafter,
    Tables,
    TableTarget,
    decode,
    draft_tables,
    exact_joint,
    p_value,
    target_tables,
)

pytestmark = pytest.mark.slow

PASSES = 1e-4
CHAIN = levels(1, 1, 1)
few = settings(derandomize=True, deadline=None, max_examples=25)


@pytest.fixture(autouse=True, scope="module")
def as_the_engine_does() -> Iterator[None]:
    with torch.inference_mode():
        yield


# -- lossless ---------------------------------------------------------------------------------------------------------

CASES = [
    ("good", 0.2, 3, False),
    ("bad", 0.2, 3, False),
    ("adversarial", 0.4, 2, False),
    ("equal", 0.2, 2, False),
    ("good", 0.0, 2, True),
]


@pytest.mark.parametrize(("quality", "zeros", "depth", "chosen"), CASES)
def test_answers_follow_the_targets_distribution(quality: str, zeros: float, depth: int, chosen: bool) -> None:
    case = CASES.index((quality, zeros, depth, chosen))
    target = target_tables(1100 + case, zeros)
    drafter = TableDrafter(draft_tables(target, quality, 1200 + case), depth=depth, chosen=chosen)
    answers = decode(Block(), target, drafter, seed=60_000_000 + 1_000_000 * case)
    assert p_value(answers, exact_joint(target)) > PASSES


@few
@given(small_tables(3), small_tables(2))
def test_a_step_says_exactly_what_the_target_would(target: Tables, drafts: Tables) -> None:
    for shape in (CHAIN, levels(1, 1, 1, chosen=True), lambda path: (int(len(path) < 3), len(path) == 1)):
        np.testing.assert_allclose(step_law(Block(), target, drafts, shape, 4), continuation(target, (), 4), atol=1e-14)


@few
@given(small_tables(3), small_tables(2))
def test_a_chain_may_end_where_its_drafts_say(target: Tables, drafts: Tables) -> None:
    """How long a chain is may depend on the drafts before: a drafter stops where it is unsure."""

    def unsure(path: Prefix) -> tuple[int, bool]:
        return int(len(path) < 3 and 0 not in path[1:]), False

    np.testing.assert_allclose(step_law(Block(), target, drafts, unsure, 4), continuation(target, (), 4), atol=1e-14)


def branches_after_a_zero(path: Prefix) -> tuple[int, bool]:
    return (0 if len(path) == 3 else 2 if len(path) == 2 and path[1] == 0 else 1), False


@few
@given(small_tables(3), small_tables(2))
def test_a_tree_may_branch_where_its_drafts_say(target: Tables, drafts: Tables) -> None:
    law = step_law(Block(), target, drafts, branches_after_a_zero, 4)
    np.testing.assert_allclose(law, continuation(target, (), 4), atol=1e-14)


# -- as many tokens as can be -----------------------------------------------------------------------------------------


@few
@given(small_tables(3), small_tables(2))
def test_never_fewer_tokens_than_rejection(target: Tables, drafts: Tables) -> None:
    ours, theirs = (mean_accepted(verifier, target, drafts, CHAIN) for verifier in (Block(), Rejection()))
    assert ours >= theirs - 1e-12


@few
@given(small_tables(3), small_tables(2))
def test_every_prefix_is_accepted_with_its_weight(target: Tables, drafts: Tables) -> None:
    """Whatever follows a prefix: its weight is its probability of acceptance, averaged over that."""
    drawn: dict[Prefix, float] = defaultdict(float)
    stood: dict[Prefix, float] = defaultdict(float)
    for likely, tree in all_trees(drafts, CHAIN):
        found = outcomes(Block(), tree, target)
        assert sum(outcome.probability for outcome in found) == pytest.approx(1.0, abs=1e-12)
        for node in range(1, len(tree)):
            drawn[tuple(tree.path_tokens(node))] += likely
            stands = sum(outcome.probability for outcome in found if node in outcome.nodes)
            stood[tuple(tree.path_tokens(node))] += likely * stands
    weights = {(): 1.0}
    for path in sorted(drawn, key=len):
        ratio = float(target[path[:-1]][path[-1]]) / float(drafts[path[:-1]][path[-1]])
        weights[path] = min(1.0, weights[path[:-1]] * ratio)
        assert stood[path] == pytest.approx(drawn[path] * weights[path], abs=1e-12)


def test_more_tokens_than_rejection_where_drafts_are_neither_right_nor_wrong() -> None:
    """Two coins: the target's heads are rarer than the draft's first, then more frequent."""
    target: Tables = {(): distribution(1, 2), (0,): distribution(2, 1), (1,): distribution(2, 1)}
    target |= {(a, b): distribution(1, 1) for a in (0, 1) for b in (0, 1)}
    drafts = {path: distribution(1, 1) for path in target}
    ours, theirs = (mean_accepted(verifier, target, drafts, levels(1, 1)) for verifier in (Block(), Rejection()))
    assert theirs == pytest.approx(5 / 6 + 25 / 36)
    assert ours == pytest.approx(5 / 6 + 3 / 4)


def test_the_target_as_its_own_draft_is_accepted_whole() -> None:
    target = target_tables(1300)
    decode(
        Block(), target, TableDrafter(target, depth=3), 70_000_000, samples=1_000,
        see=lambda prefix, tree, verdict: np.testing.assert_equal(verdict.nodes, list(range(1, len(tree)))),
    )  # fmt: skip


# -- the same as others where it should be ----------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True])
def test_traversal_equals_block_on_a_chain(chosen: bool) -> None:
    target = target_tables(1400)
    drafter = TableDrafter(draft_tables(target, "bad", 1401), depth=3, chosen=chosen)
    ours, theirs = (decode(verifier, target, drafter, 71_000_000, 800) for verifier in (Block(), Traversal()))
    assert ours == theirs


@pytest.mark.parametrize("branch", [1, 2])
@pytest.mark.parametrize("chosen", [False, True])
def test_greedy_is_match(branch: int, chosen: bool) -> None:
    sampled = target_tables(1500)
    greedy = {path: torch.nn.functional.one_hot(p.argmax(), len(p)).double() for path, p in sampled.items()}
    drafter = TableDrafter(sampled, depth=3, branch=branch, chosen=chosen)
    seen: list[int] = []
    ours, theirs = (
        decode(verifier, greedy, drafter, 72_000_000, 400, see=lambda path, tree, verdict: seen.append(verdict.nodes))
        for verifier in (Block(), Match())
    )
    assert ours == theirs and seen[: len(seen) // 2] == seen[len(seen) // 2 :]


# -- numbers at their limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owed", "q", "weight"),
    [(0.0, 0.5, 0.0), (0.0, 0.0, 0.0), (0.0, 5e-324, 0.0), (5e-324, 5e-324, 1.0), (0.5, 5e-324, 1.0), (0.2, 0.4, 0.5)],
)
def test_shares(owed: float, q: float, weight: float) -> None:
    assert share(owed, q) == weight


def test_what_is_left_never_divides_by_nothing() -> None:
    p = distribution(1, 2, 1)
    owed, weight = after_rejection(p, 1.0, p)  # equal: the child cannot fall but by rounding
    assert weight == 1.0 and torch.equal(owed, p)
    owed, weight = after_rejection(0.5 * p, 0.5, p)  # the child could have paid all: the node can no longer be accepted
    assert weight == 0.0 and not owed.any()
    owed, weight = after_rejection(p, 1.0, p + torch.tensor([0.0, 0.0, -1e-17 + 1e-16]).double())
    assert weight == 1.0 and bool(torch.isfinite(owed).all())


def extreme(generator: np.random.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Five tokens whose probabilities span everything from certain to below the smallest number."""
    logits = torch.from_numpy(generator.choice([0.0, 0.0, -1.0, -40.0, -87.0, -740.0, -np.inf], size=5))
    logits[int(generator.integers(5))] = 0.0
    return torch.softmax(logits, dim=0).to(dtype)


@pytest.mark.parametrize("verifier", [Block(), Traversal()])
@pytest.mark.parametrize("u", [2**-53, 0.5, 1 - 2**-53, None])
def test_a_token_without_probability_is_never_emitted(
    verifier: Block | Traversal, u: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if u is not None:
        monkeypatch.setattr(noise, "uniform", lambda key: u)
    generator = np.random.default_rng(1600)
    for sample in range(150):
        target = {(): extreme(generator, torch.float64)}
        tree = TokenTree(0)
        while len(tree) < 9:
            parent = int(generator.integers(len(tree))) if isinstance(verifier, Traversal) else len(tree) - 1
            if tree.children(parent):
                break
            q = extreme(generator, torch.float32)
            order = generator.permutation(q.nonzero()[:, 0].numpy())[: int(generator.integers(1, 4))]
            draw = Draw(q) if generator.random() < 0.7 else None
            for token in order if isinstance(verifier, Traversal) else order[:1]:
                node = tree.add(parent, int(token), draw=draw)
                target[tuple(tree.path_tokens(node))] = extreme(generator, torch.float64)
        tree.check(0, 5)
        verdict = verifier(tree, TableTarget(target, tree, (), Randomness(sample, 1), 0))
        said = tuple(verdict.tokens)
        assert all(float(target[said[:i]][token]) > 0.0 for i, token in enumerate(said))
        assert list(said[:-1]) == [tree.tokens[node] for node in verdict.nodes]


def test_nothing_is_requested_below_what_cannot_be_accepted() -> None:
    target = {(): distribution(0, 1), (0,): distribution(1, 1), (0, 0): distribution(1, 1)}
    tree = TokenTree.chain(1, [0, 0])
    asked = Numbered(target, tree)
    assert Block()(tree, asked).nodes == []
    assert asked.nodes == [0]
