"""The checks of `block` and `traversal` have teeth: the faults that such verifiers can have are planted and found.

Faults of arithmetic are judged exactly: the right code says what the target would, to the last bits, and a faulty one
is far off somewhere. Faults of randomness are judged by chi-square, with the seeds and the bounds
of `tests/verify/test_verify_mutations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from slipstream import noise
from slipstream.tree import TokenTree
from slipstream.verify import Block, Rejection, Traversal, Verdict, Verifier, block, traversal
from slipstream.verify.base import Distributions
from tests.verify.outcomes import Shape, continuation, distribution, levels, random_tables, step_law
from tests.verify.tables import (
    PREFIXES,
    PROMPT,
    Prefix,
    Randomness,
    TableDrafter,
    TableTarget,
    decode,
    draft_tables,
    exact_joint,
    p_value,
    target_tables,
)
from tests.verify.test_verify_block import branches_after_a_zero
from tests.verify.test_verify_mutations import FAILS, PASSES, OtherTemperature, PrunedByToken, SoftmaxForChosen


@pytest.fixture(autouse=True, scope="module")
def as_the_engine_does() -> Iterator[None]:
    with torch.inference_mode():
        yield


# -- arithmetic -------------------------------------------------------------------------------------------------------


def error(verifier: Verifier, shape: Shape) -> float:
    """How far from the target's the probability of a text is, where it is farthest. The draft knows nothing."""
    target, drafts = random_tables(3, 31), random_tables(2, 32)
    return float(np.abs(step_law(verifier, target, drafts, shape, 4) - continuation(target, (), 4)).max())


CHAIN, TREE = levels(1, 1, 1), levels(1, 2, 1)
NEAR, FAR = 1e-14, 1e-4


@pytest.mark.parametrize(
    ("verifier", "shape"),
    [(Block(), CHAIN), (Block(), branches_after_a_zero), (Traversal(), CHAIN), (Traversal(), TREE)],
)
def test_the_right_code_is_exact(verifier: Verifier, shape: Shape) -> None:
    assert error(verifier, shape) < NEAR


Left = tuple[torch.Tensor, float]


def left_over(owed: torch.Tensor, weight: float, q: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """The positive part of owed - q, its sum, and the probability that a child of q falls."""
    rest = (owed - q).clamp(min=0.0)
    return rest, float(rest.sum()), float(rest.sum()) + 1.0 - weight


def without_the_chance_to_fall(owed: torch.Tensor, weight: float, q: torch.Tensor) -> Left:
    rest, total, _ = left_over(owed, weight, q)
    return rest, float(total > 0)


def with_the_weight_as_it_was(owed: torch.Tensor, weight: float, q: torch.Tensor) -> Left:
    rest, total, falls = left_over(owed, weight, q)
    return (rest / falls if total > 0 else owed), weight


def with_siblings_scaled_to_the_weight_as_it_was(owed: torch.Tensor, weight: float, q: torch.Tensor) -> Left:
    rest, total, _ = left_over(owed, weight, q)
    return (rest * weight / total if total > 0 else owed), weight


def with_the_residual_of_one_token(owed: torch.Tensor, weight: float, q: torch.Tensor) -> Left:
    """Takes q from p where it should take it from w p."""
    _, total, falls = left_over(owed, weight, q)
    return (owed / weight - q).clamp(min=0.0), total / falls


def with_nothing_taken_away(owed: torch.Tensor, weight: float, q: torch.Tensor) -> Left:
    _, total, falls = left_over(owed, weight, q)
    return owed, total / falls


def with_nothing_changed(owed: torch.Tensor, weight: float, q: torch.Tensor) -> Left:
    return owed, weight


def stopping_at_the_first_loser(target: Distributions, node: int, chance: float) -> bool:
    """The longest run of winners instead of the deepest winner."""
    stands = not getattr(target, "lost", False) and noise.uniform(target.key(node, noise.ACCEPT)) < chance
    target.lost = not stands  # type: ignore[attr-defined]
    return stands


def in_reverse(tree: TokenTree) -> list[list[int]]:
    return [family[::-1] for family in honest_families(tree)]


honest_families = traversal.families

FAULTS: dict[str, tuple[type[Verifier], str, Callable[..., object], Shape]] = {
    "block: a weight above 1": (Block, "share", lambda owed, q: owed / q, CHAIN),
    "block: h without 1 - w": (Block, "after_rejection", without_the_chance_to_fall, CHAIN),
    "block: h is the weight": (Block, "after_rejection", with_the_weight_as_it_was, CHAIN),
    "block: residual without w": (Block, "after_rejection", with_the_residual_of_one_token, CHAIN),
    "block: own token from p": (Block, "after_rejection", with_nothing_taken_away, CHAIN),
    "block: the first loser ends the path": (Block, "wins", stopping_at_the_first_loser, CHAIN),
    "traversal: a weight above 1": (Traversal, "share", lambda owed, q: owed / q, TREE),
    "traversal: no residual for siblings": (Traversal, "after_rejection", with_nothing_taken_away, TREE),
    "traversal: weight not updated": (Traversal, "after_rejection", with_the_weight_as_it_was, TREE),
    "traversal: weight not updated, siblings in scale": (
        Traversal, "after_rejection", with_siblings_scaled_to_the_weight_as_it_was, TREE,
    ),
    "traversal: a fall changes nothing": (Traversal, "after_rejection", with_nothing_changed, TREE),
    "traversal: weight without the chance to fall": (Traversal, "after_rejection", without_the_chance_to_fall, TREE),
    "traversal: residual without w": (Traversal, "after_rejection", with_the_residual_of_one_token, TREE),
    "traversal: q keeps the token that was drawn": (Traversal, "without", lambda q, token: q, TREE),
    "traversal: siblings not in the order they were drawn": (Traversal, "families", in_reverse, TREE),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_arithmetic_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, name, function, shape = FAULTS[fault]
    monkeypatch.setattr(block if verifier is Block else traversal, name, function)
    assert error(verifier(), shape) > FAR


class RejectionForTrees(Verifier):
    """`block` for chains and another lossless rule for trees that branch, although drafts decide which it is."""

    name = "mixed"
    uses_draws = True

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        branches = any(len(family) > 1 for family in traversal.families(tree))
        return (Rejection() if branches else Block())(tree, target)


def test_two_lossless_rules_picked_by_the_drafts_are_not_lossless() -> None:
    assert error(Rejection(), branches_after_a_zero) < NEAR > error(Block(), branches_after_a_zero)
    assert error(RejectionForTrees(), branches_after_a_zero) > FAR


def test_a_number_that_is_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "wins", lambda target, node, chance: noise.uniform(target.key(1, noise.ACCEPT)) < chance)
    with pytest.raises(AssertionError, match="used twice"):
        error(Block(), CHAIN)


# -- randomness -------------------------------------------------------------------------------------------------------


SAMPLES = 4_000


def judged(drafter: type[TableDrafter], verifier: Verifier, branch: int, chosen: bool = False) -> float:
    """The p-value of one verifier on one draft that knows nothing of the target."""
    target = target_tables(41, zeros=0.1)
    drafts = drafter(draft_tables(target, "bad", 42), depth=3 if branch == 1 else 2, branch=branch, chosen=chosen)
    return p_value(decode(verifier, target, drafts, seed=4_000_000, samples=SAMPLES), exact_joint(target))


def judged_by_coins(drafter: type[TableDrafter], verifier: Verifier) -> float:
    """The same where it matters most that steps share no number.

    The target tosses fair coins. The draft's first coin is always 0, its second mostly: if that second one is 0, the
    first is likely to fall because of it, and the next step has to draft and to judge the second coin anew.
    """
    target = {prefix: distribution(1, 1, 0, 0, 0) for prefix in PREFIXES}
    coins = [distribution(*weights, 0, 0, 0) for weights in ((1, 0), (3, 1), (1, 0), (1, 1), (1, 1))]
    drafts = drafter({prefix: coins[len(prefix)] for prefix in PREFIXES}, depth=2)
    return p_value(decode(verifier, target, drafts, seed=4_500_000, samples=SAMPLES // 2), exact_joint(target))


def test_the_right_code_passes() -> None:
    assert judged_by_coins(TableDrafter, Block()) > PASSES
    assert judged(TableDrafter, Block(), 1) > PASSES
    assert judged(TableDrafter, Traversal(), 3) > PASSES
    assert judged(TableDrafter, Traversal(), 3, chosen=True) > PASSES


@dataclass
class Rekeyed(Verifier):
    """A verifier whose numbers are keyed by another rule."""

    verifier: Verifier
    rule: Callable[[TableTarget, int, int], int]

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        assert isinstance(target, TableTarget)
        other = TableTarget(target.tables, tree, target.prefix, target.random, target.sample)
        other.key = lambda node, purpose: self.rule(target, node, purpose)  # type: ignore[method-assign]
        return self.verifier(tree, other)


def one_for_all(target: TableTarget, node: int, purpose: int) -> int:
    return target.key(1 if purpose == noise.ACCEPT else node, purpose)


def one_for_siblings(target: TableTarget, node: int, purpose: int) -> int:
    return target.key(target.tree.parents[node] if purpose == noise.ACCEPT else node, purpose)


def one_for_both_purposes(target: TableTarget, node: int, purpose: int) -> int:
    return target.key(node, noise.ACCEPT)


def by_position(target: TableTarget, node: int, purpose: int) -> int:
    """By where the node lies in the text, and not by the step that tried it: a later step meets the number again."""
    position = PROMPT + len(target.prefix) + target.tree.depths[node]
    return target.random.key(target.sample, position, 0, purpose)


def test_a_fault_of_keys_is_found() -> None:
    assert judged_by_coins(TableDrafter, Rekeyed(Block(), one_for_all)) < FAILS
    assert judged_by_coins(TableDrafter, Rekeyed(Block(), one_for_both_purposes)) < FAILS
    assert judged(TableDrafter, Rekeyed(Traversal(), one_for_siblings), 3, chosen=True) < FAILS


def test_numbers_by_position_are_wrong_for_block_though_right_for_rejection() -> None:
    assert judged_by_coins(TableDrafter, Rekeyed(Rejection(), by_position)) > PASSES
    assert judged_by_coins(TableDrafter, Rekeyed(Block(), by_position)) < FAILS
    assert judged_by_coins(TableDrafter, Rekeyed(Traversal(), by_position)) < FAILS


class DrawnByPosition(TableDrafter):
    """Draws a token of a chain by the noise of its position, whichever step draws it."""

    def tree(self, prefix: Prefix, random: Randomness, sample: int) -> TokenTree:
        return super().tree(prefix, Absolute(random), sample)  # type: ignore[arg-type]


@dataclass
class Absolute:
    random: Randomness

    def gumbel(self, sample: int, position: int, parent: int, purpose: int) -> list[float]:
        return self.random.gumbel(sample, position + parent, 0, purpose)  # in a chain a node's index is its depth


def test_drafts_drawn_by_position_are_wrong_for_block_though_right_for_rejection() -> None:
    assert judged_by_coins(DrawnByPosition, Rejection()) > PASSES
    assert judged_by_coins(DrawnByPosition, Block()) < FAILS
    assert judged_by_coins(DrawnByPosition, Traversal()) < FAILS


@pytest.mark.parametrize(
    ("drafter", "verifier", "branch", "chosen"),
    [
        (PrunedByToken, Block(), 1, False),
        (OtherTemperature, Block(), 1, False),
        (SoftmaxForChosen, Traversal(), 3, True),
        (PrunedByToken, Traversal(), 3, False),
    ],
)
def test_a_faulty_draft_is_found(drafter: type[TableDrafter], verifier: Verifier, branch: int, chosen: bool) -> None:
    assert judged(drafter, verifier, branch, chosen) < FAILS
