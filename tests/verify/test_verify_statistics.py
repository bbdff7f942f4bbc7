"""What verifiers emit follows the target's distribution: chi-square of whole answers against exact probabilities.

Every seed is fixed, so a case passes always or never. Were the seeds drawn afresh, a right verifier would fail one of
the 12 chi-squares (p > 1e-4 each) or 3 acceptance counts (4.5 sigma, 7e-6 each) about once in 800 runs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from slipstream import noise
from slipstream.sampling import Sampler, TreeDistributions
from slipstream.tree import TokenTree
from slipstream.types import SamplingParams
from slipstream.verify import Match, Rejection
from tests.verify.tables import (
    LONGEST,
    POSITIONS,
    PROMPT,
    ROOT_TOKEN,
    VOCABULARY,
    Prefix,
    Randomness,
    TableDrafter,
    decode,
    draft_tables,
    exact_joint,
    p_value,
    target_tables,
)

pytestmark = pytest.mark.slow

PASSES = 1e-4
ENOUGH = 20_000  # answers of a case


def test_random_numbers_are_the_packages_own() -> None:
    made = Randomness(first_seed=123_456, samples=50)
    for sample in (0, 17, 49):
        sampler = Sampler(SamplingParams(), 123_456 + sample, 0, [1] * PROMPT, [2, 3], [])
        for node, purpose in itertools.product((0, 5), (noise.DRAFT, noise.ACCEPT, noise.RESIDUAL)):
            assert made.key(sample, sampler.position, node, purpose) == sampler.step_key(node, purpose)
        expected = noise.gumbel(noise.key(123_456 + sample, 0, 9, noise.MATCH), VOCABULARY)
        np.testing.assert_allclose(made.gumbel(sample, 9, noise.MATCH), expected, rtol=1e-12)


# -- rejection --------------------------------------------------------------------------------------------------------

SHAPES = {"chain": {"depth": 3}, "pairs": {"depth": 3, "branch": 2}, "triples": {"depth": 2, "branch": 3}}
CASES = [
    ("chain", "good", 0.2),
    ("chain", "bad", 0.2),
    ("chain", "adversarial", 0.4),
    ("chain", "equal", 0.2),
    ("pairs", "good", 0.0),
    ("pairs", "bad", 0.2),
    ("triples", "adversarial", 0.4),
    ("triples", "equal", 0.2),
]


@pytest.mark.parametrize(("shape", "quality", "zeros"), CASES)
def test_rejection_of_sampled_nodes_is_lossless(shape: str, quality: str, zeros: float) -> None:
    case = CASES.index((shape, quality, zeros))
    target = target_tables(100 + case, zeros)
    drafter = TableDrafter(draft_tables(target, quality, 200 + case), **SHAPES[shape])
    answers = decode(Rejection(), target, drafter, seed=1_000_000 * (case + 1), samples=ENOUGH)
    assert p_value(answers, exact_joint(target)) > PASSES


@pytest.mark.parametrize(("shape", "quality"), [("chain", "good"), ("pairs", "good"), ("triples", "bad")])
def test_rejection_of_chosen_nodes_is_lossless(shape: str, quality: str) -> None:
    case = list(SHAPES).index(shape)
    target = target_tables(300 + case)
    drafter = TableDrafter(draft_tables(target, quality, 400 + case), chosen=True, **SHAPES[shape])
    answers = decode(Rejection(), target, drafter, seed=20_000_000 + 1_000_000 * case, samples=ENOUGH)
    assert p_value(answers, exact_joint(target)) > PASSES


@pytest.mark.parametrize(("quality", "seed"), [("good", 1), ("bad", 2), ("equal", 3)])
def test_rejection_accepts_as_often_as_it_can(quality: str, seed: int) -> None:
    """Rejecting everything is lossless too, so count: a first node is accepted with the mass that p and q share."""
    target = target_tables(500 + seed)
    drafts = draft_tables(target, quality, 600 + seed)
    accepted = []
    decode(
        Rejection(), target, TableDrafter(drafts, depth=1), 40_000_000 * seed, samples=4_000,
        see=lambda prefix, tree, verdict: None if prefix else accepted.append(bool(verdict.nodes)),
    )  # fmt: skip
    share = float(torch.minimum(target[()], drafts[()]).sum())
    spread = (share * (1 - share) / len(accepted)) ** 0.5
    assert abs(np.mean(accepted) - share) <= 4.5 * spread + 1e-12


# -- match ------------------------------------------------------------------------------------------------------------


def test_match_is_lossless() -> None:
    target = target_tables(700)
    drafter = TableDrafter(draft_tables(target, "good", 701), depth=2, branch=2)
    answers = decode(Match(), target, drafter, seed=50_000_000)
    assert p_value(answers, exact_joint(target)) > PASSES


def test_match_emits_the_same_with_any_tree() -> None:
    target = target_tables(800)
    logits = {prefix: p.log().float() for prefix, p in target.items()}
    generator = np.random.default_rng(801)

    def answer(seed: int, size: int) -> Prefix:
        output: list[int] = []
        sampler = Sampler(SamplingParams(temperature=0.8), seed, 0, [1] * PROMPT, output, [])
        while len(output) < POSITIONS:
            tree = TokenTree(output[-1] if output else ROOT_TOKEN)
            for _ in range(size):
                parent = int(generator.integers(len(tree)))
                if tree.depths[parent] + len(output) < LONGEST:
                    tree.add(parent, int(generator.integers(VOCABULARY)))
            rows = torch.stack([logits[(*output, *tree.path_tokens(n))] for n in range(len(tree))])
            output.extend(Match()(tree, TreeDistributions(sampler, tree, rows)).tokens)
        return tuple(output[:POSITIONS])

    for seed in range(2_000):
        assert answer(seed, size=0) == answer(seed, size=1 + seed % 12)
