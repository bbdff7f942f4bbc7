"""The statistical check has teeth: each fault that p/q verification is known for is planted, and must be found.

A fault and the right code see the same seeds and the same case. The right one must pass (p > 1e-4; three cases, so
fresh seeds would raise a false alarm once in 3,300 runs), the faulty one must fail far beyond chance (p < 1e-6).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream import noise
from slipstream.tree import Draw, TokenTree
from slipstream.verify import Rejection, Verdict, Verifier, rejection
from slipstream.verify.base import Distributions
from tests.verify.tables import (
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

pytestmark = pytest.mark.slow

SAMPLES = 3_000
PASSES, FAILS = 1e-4, 1e-6


class PrunedByToken(TableDrafter):
    """Drops sampled nodes of low q: whether a node is there depends on its token."""

    def tree(self, prefix: Prefix, random: Randomness, sample: int) -> TokenTree:
        whole = super().tree(prefix, random, sample)
        likely = {n for n in range(1, len(whole)) if float(whole.draws[n].q[whole.tokens[n]]) > 0.25}
        return whole.subtree([0, *sorted(likely)])


class OtherTemperature(TableDrafter):
    """Draws at temperature 1 and hands over the q of temperature 1.5."""

    def _row(self, prefix: Prefix) -> tuple[Draw, list[float], list[int]]:
        if prefix not in self.known:
            _, logs, ids = super()._row(prefix)
            warm = self.tables[prefix] ** (1 / 1.5)
            self.known[prefix] = Draw(warm / warm.sum()), logs, ids
        return self.known[prefix]


class SoftmaxForChosen(TableDrafter):
    """Takes the top-k and calls their softmax probability q, as if they had been drawn."""

    def tree(self, prefix: Prefix, random: Randomness, sample: int) -> TokenTree:
        chosen = super().tree(prefix, random, sample)
        for node in range(1, len(chosen)):
            parent = chosen.parents[node]
            draw, _, _ = self._row((*prefix, *chosen.path_tokens(parent)))
            chosen.draws[node] = draw
        return chosen


class BonusOfParent(Rejection):
    """After a path that stood to its end, draws the last token from the distribution one row up."""

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        verdict = super().__call__(tree, target)
        end = verdict.nodes[-1] if verdict.nodes else 0
        if end == 0 or tree.children(end):
            return verdict
        wrong = target.probabilities(tree.parents[end])
        token = rejection.draw(wrong, noise.uniform(target.key(end, noise.RESIDUAL)))
        return Verdict(verdict.nodes, [*verdict.tokens[:-1], token])


def siblings_against_the_original(tree: TokenTree, node: int, target: Distributions) -> tuple[int | None, torch.Tensor]:
    """`try_children` in which what a refused sibling took away is never taken away from p."""
    p = target.probabilities(node)
    q, left = None, p
    for child in tree.children(node):
        token = tree.tokens[child]
        q = tree.draws[child].q if q is None else q
        if noise.uniform(target.key(child, noise.ACCEPT)) * float(q[token]) < float(p[token]):
            return child, p
        left, q = rejection.residual(p, q), rejection.without(q, token)
    return None, left


def accepting_equality(tree: TokenTree, node: int, target: Distributions) -> tuple[int | None, torch.Tensor]:
    """`try_children` of one child that accepts with <= instead of <."""
    child = tree.children(node)[0]
    p, token, draw = target.probabilities(node), tree.tokens[child], tree.draws[child]
    q = 1.0 if draw is None else float(draw.q[token])
    stands = noise.uniform(target.key(child, noise.ACCEPT)) * q <= float(p[token])
    return (child if stands else None), p


def judged(drafter: type[TableDrafter], verifier: type[Verifier], branch: int, chosen: bool) -> float:
    """The p-value of one verifier on one draft. Good drafts hide faults, so the draft knows nothing of the target."""
    target = target_tables(11, zeros=0.1)
    drafts = drafter(draft_tables(target, "bad", 12), depth=2, branch=branch, chosen=chosen)
    return p_value(decode(verifier(), target, drafts, seed=3_000_000, samples=SAMPLES), exact_joint(target))


@pytest.mark.parametrize(("branch", "chosen"), [(1, False), (3, False), (3, True)])
def test_the_right_code_passes(branch: int, chosen: bool) -> None:
    assert judged(TableDrafter, Rejection, branch, chosen) > PASSES


# -- faults in the verifier -------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[str, Callable[..., object], int]] = {
    "residual not subtracted, chain": ("residual", lambda p, q: p, 1),
    "residual not subtracted, tree": ("residual", lambda p, q: p, 3),
    "residual not normalised": ("residual", lambda p, q: (p - q).clamp(min=0.0) if (p > q).any() else p, 3),
    "siblings tried against the original p": ("try_children", siblings_against_the_original, 3),
    "q keeps the token that was drawn": ("without", lambda q, token: q, 3),
}


@pytest.mark.parametrize("fault", FUNCTIONS)
def test_a_faulty_function_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, branch = FUNCTIONS[fault]
    monkeypatch.setattr(rejection, name, function)
    assert judged(TableDrafter, Rejection, branch, False) < FAILS


def test_a_bonus_token_from_the_wrong_row_is_found() -> None:
    assert judged(TableDrafter, BonusOfParent, 1, False) < FAILS


# -- faults in the draft ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "branch", "chosen"),
    [
        (OtherTemperature, 1, False),
        (OtherTemperature, 3, False),
        (PrunedByToken, 1, False),
        (PrunedByToken, 3, False),
        (SoftmaxForChosen, 1, True),
        (SoftmaxForChosen, 3, True),
    ],
)
def test_a_faulty_draft_is_found(drafter: type[TableDrafter], branch: int, chosen: bool) -> None:
    assert judged(drafter, Rejection, branch, chosen) < FAILS


# -- u = 0: too rare for statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [True, False])
def test_a_token_of_probability_zero_is_never_accepted(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.9, 0.1, 0.0, 0.0, 0.0], dtype=torch.float64)
    tree = TokenTree(0)
    tree.add(0, 0, draw=Draw(q) if sampled else None)
    target = TableTarget({(): p}, tree, (), Randomness(0, 1), 0)
    monkeypatch.setattr(noise, "uniform", lambda key: 0.0)
    assert accepting_equality(tree, 0, target)[0] == 1, "the fault must show here, or this case proves nothing"
    assert rejection.try_children(tree, 0, target)[0] is None
    verdict = Rejection()(tree, target)
    assert verdict.nodes == [] and p[verdict.tokens[0]] > 0


def test_uniform_numbers_are_never_zero_or_one() -> None:
    for extreme in (0, 2**64 - 1, 0xB5297A4D << 32 | 0x68E31DA4):  # the last one mixes to all zeros
        assert 0.0 < noise.uniform(extreme) < 1.0


@pytest.mark.parametrize("u", [0.0, 1e-17, 0.5, 1 - 2**-53, 1.0])
def test_a_draw_never_gives_a_token_of_probability_zero(u: float) -> None:
    for p in ([0.0, 0.3, 0.0, 0.7, 0.0], [0.1] * 9 + [0.1 - 1e-17, 0.0], [0.0, 1.0], [1e-300, 0.0]):
        tensor = torch.tensor(p, dtype=torch.float64)
        assert tensor[rejection.draw(tensor, u)] > 0
