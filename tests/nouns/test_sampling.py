"""From logits to a distribution: against a slow reference in numpy, and statistical tests of the noise.

Statistical cases have fixed seeds. With fresh ones a right sampler would fail one of the 14 tests of fit (p > 1e-4
each) or of the correlations (bounds as stated there) about once in 700 runs.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from slipstream import noise
from slipstream.sampling import WEIGHT_BITS, BadWords, Sampler, TreeDistributions, token_weights
from slipstream.tree import TokenTree
from slipstream.types import SamplingParams

VOCABULARY = 12
END_IDS = (3, 5)
fixed = settings(derandomize=True, deadline=None, max_examples=300)

# Quarters: exact ties are common, and adding and halving them is exact in float32.
numbers = st.integers(-24, 24).map(lambda n: n / 4)
rows = st.lists(st.one_of(numbers, numbers, numbers, st.just(-math.inf)), min_size=VOCABULARY, max_size=VOCABULARY)
finite_somewhere = rows.filter(lambda row: any(math.isfinite(x) for i, x in enumerate(row) if i not in END_IDS))
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, VOCABULARY + 2),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.sampled_from([0.0, 0.03, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), numbers, max_size=3),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.sampled_from([3, 5]), max_size=2),
        "allowed_token_ids": st.sets(st.integers(0, VOCABULARY - 1), min_size=3).map(lambda s: sorted(s | {8, 9, 10})),
        "bad_words": st.just(["seven", "two two", "eight two", "one eight"]),
    },
)


def row_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


BAD_WORDS = ([7], [2, 2], [8, 2], [1, 8])  # what `bad_words` stands for here


def sampler_of(params: SamplingParams, prompt: Any = (), output: Any = (), seed: int = 1) -> Sampler:
    words = BadWords(BAD_WORDS) if params.bad_words else None
    return Sampler(params, seed, 0, list(prompt), list(output), END_IDS, words)


# -- the reference ----------------------------------------------------------------------------------------------------


def expected_logits(values: list[float], p: SamplingParams, prompt: list[int], said: list[int]) -> list[float]:
    logits = list(values)
    for token in range(VOCABULARY):
        bad = p.bad_words and any([*said, token][-len(word) :] == word for word in BAD_WORDS)
        if bad or token not in (p.allowed_token_ids or range(VOCABULARY)):
            logits[token] = -math.inf
    if len(said) < p.min_tokens:
        for token in {*END_IDS, *p.stop_token_ids}:
            logits[token] = -math.inf
    for token, bias in p.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *said}:
        logits[token] *= p.repetition_penalty if logits[token] <= 0 else 1 / p.repetition_penalty
    for token, count in Counter(said).items():
        logits[token] -= p.presence_penalty + count * p.frequency_penalty
    return logits


def expected_support(logits: list[float], p: SamplingParams) -> tuple[set[int], set[int]]:
    """The tokens that must be there, and those that may be: top-p at a rounding error from its limit is not judged."""
    if p.temperature == 0:
        return ({logits.index(max(logits))},) * 2
    scaled = {token: value / p.temperature for token, value in enumerate(logits)}
    order = sorted(scaled, key=lambda token: (-scaled[token], token))
    if p.min_p:
        order = [t for t in order if scaled[t] >= scaled[order[0]] + math.log(p.min_p)]
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p == 1.0:
        return {t for t in order if scaled[t] > -math.inf}, set(order)
    weights = np.exp(np.array([scaled[t] for t in order]) - scaled[order[0]])
    before = (np.cumsum(weights) - weights) / weights.sum()
    surely = {t for t, b, w in zip(order, before, weights, strict=True) if b < p.top_p - 1e-9 and w > 0}
    perhaps = {t for t, b in zip(order, before, strict=True) if b < p.top_p + 1e-9}
    return surely | {order[0]}, perhaps | {order[0]}


@fixed
@given(finite_somewhere, parameters, ids, ids, ids)
@example([1.0] * VOCABULARY, {"top_k": 5}, [], [], [])
@example([1.0] * VOCABULARY, {"top_p": 0.5}, [], [], [])
@example([0.0] * VOCABULARY, {"temperature": 0.0, "repetition_penalty": 2.0}, [0], [1], [2])
def test_the_distribution_is_the_references(
    values: list[float], options: dict[str, Any], prompt: list[int], output: list[int], path: list[int]
) -> None:
    params = SamplingParams(**options)
    sampler = sampler_of(params, prompt, output)
    row = row_of(values)
    before = row.clone()
    logits = expected_logits(values, params, prompt, [*output, *path])
    if max(logits) == -math.inf:  # the row knows none of the tokens that may come: they are alike
        logits = expected_logits([0.0] * VOCABULARY, params, prompt, [*output, *path])
    assert sampler.adjusted(row, path).tolist() == pytest.approx(logits)
    surely, perhaps = expected_support(logits, params)
    probabilities = sampler.probabilities(row, path)
    support = sampler.support(row, path)
    listed = list(range(VOCABULARY)) if support.ids is None else support.ids.tolist()
    assert listed == sorted(set(listed)) and len(listed) == len(support.logits)
    kept = set(probabilities.nonzero()[:, 0].tolist())
    assert surely <= kept <= perhaps & set(listed)
    scale = params.temperature or 1.0
    weights = np.array([math.exp(logits[t] / scale) if t in kept else 0.0 for t in range(VOCABULARY)])
    np.testing.assert_allclose(probabilities, weights / weights.sum(), rtol=1e-5, atol=1e-12)
    assert probabilities.dtype == torch.float64 and float(probabilities.sum()) == pytest.approx(1.0, abs=1e-12)
    assert sampler.choose(row, path) in kept
    assert torch.equal(row, before), "the model's logits were written to"


@fixed
@given(finite_somewhere, parameters, ids, ids)
def test_a_node_sees_what_a_sequence_that_went_there_sees(
    values: list[float], options: dict[str, Any], output: list[int], path: list[int]
) -> None:
    """Penalties, minimum length and noise must not know whether tokens were emitted or are on the path of a tree."""
    params = SamplingParams(**options)
    drafting, there = sampler_of(params, [1, 2], output), sampler_of(params, [1, 2], [*output, *path])
    row = row_of(values)
    assert torch.equal(drafting.probabilities(row, path), there.probabilities(row, []))
    assert drafting.choose(row, path) == there.choose(row, [])
    tree = TokenTree.chain(0, path)
    rows = row.expand(len(tree), -1)
    assert TreeDistributions(drafting, tree, rows).choose(len(path)) == there.choose(row, [])
    # An unaccepted sibling must not count.
    tree.add(0, 11)
    rows = row.expand(len(tree), -1)
    assert torch.equal(TreeDistributions(drafting, tree, rows).probabilities(len(path)), there.probabilities(row, []))


# -- top-p beyond the first look --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "top_p", "kept"),
    [
        (torch.zeros(20_000), 0.5, 10_000),  # all tie: the lowest ids
        (torch.zeros(20_000), 0.1 + 1e-9, 2_001),
        (torch.cat([torch.zeros(1_000), torch.full((4_000,), -1.0)]), 0.7, 2_985),
        (torch.cat([torch.full((4_000,), -1.0), torch.zeros(1_024)]), 0.4, None),
        (torch.linspace(0, -3, 9_000), 0.9, None),
        (torch.linspace(-3, 0, 1_500), 0.999, None),
        (torch.linspace(-3, 0, 1_024), 0.999, None),
    ],
)
def test_large_nuclei(values: torch.Tensor, top_p: float, kept: int | None) -> None:
    support = sampler_of(SamplingParams(top_p=top_p)).support(values, [])
    weights = np.exp(values.double().numpy())
    order = np.argsort(-weights, kind="stable")  # ties by token id
    before = np.cumsum(weights[order]) - weights[order]
    expected = np.sort(order[before < top_p * weights.sum() * (1 - 1e-12)])
    assert support.ids.tolist() == expected.tolist()
    if kept is not None:
        assert abs(len(support.ids) - kept) <= 1


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(900, 6_000), st.floats(0.05, 0.999), st.sampled_from([0.25, 1.0, 8.0]))
def test_nuclei_of_coarse_logits_break_ties_by_token_id(seed: int, size: int, top_p: float, step: float) -> None:
    generator = np.random.default_rng(seed)
    values = np.round(generator.normal(size=size) / step) * step
    support = sampler_of(SamplingParams(top_p=top_p)).support(torch.from_numpy(values).float(), [])
    kept = support.ids.tolist()
    lowest = min(values[kept])
    assert np.isin(np.flatnonzero(values > lowest), kept).all()
    tied = np.flatnonzero(values == lowest).tolist()
    chosen = [t for t in kept if values[t] == lowest]
    assert chosen == tied[: len(chosen)]
    weights = np.exp(values)
    mass = weights[kept].sum() / weights.sum()
    assert mass >= top_p - 1e-9 and mass - math.exp(lowest) / weights.sum() < top_p + 1e-9


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.999), st.sampled_from([0.01, 1.0]))
def test_the_nucleus_does_not_depend_on_the_order_of_its_sum(seed: int, top_p: float, step: float) -> None:
    """The same logits in another order have the same nucleus; only ties go to other tokens."""
    generator = np.random.default_rng(seed)
    values = np.round(generator.normal(size=2_000) * 3 / step).astype(np.float32) * np.float32(step)
    order = generator.permutation(len(values))
    sampler = sampler_of(SamplingParams(top_p=top_p))
    one, other = (sampler.support(torch.from_numpy(row), []).logits for row in (values, values[order]))
    assert torch.equal(one.sort().values, other.sort().values)
    weights = token_weights(torch.from_numpy(values), torch.from_numpy(values).max())
    assert weights.dtype == torch.int64 and int(weights.max()) == 2**WEIGHT_BITS


# -- choices and noise ------------------------------------------------------------------------------------------------

PASSES = 1e-4
ROW = row_of([2.0, 1.0, 1.0, 0.5, -0.5, -1.0, -math.inf, 0.0])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3, "temperature": 1.5}])
def test_choices_are_distributed_as_the_probabilities(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    counts = Counter(sampler_of(params, [1] * 4, seed=seed).choose(ROW, []) for seed in range(5_000))
    exact = sampler_of(params).probabilities(ROW, []).numpy()
    possible = exact > 0
    observed = np.array([counts[token] for token in range(len(ROW))])
    assert not observed[~possible].any()
    assert stats.chisquare(observed[possible], exact[possible] * observed.sum()).pvalue > PASSES


@fixed
@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 4_095), min_size=1, max_size=20))
def test_noise_of_a_token_does_not_depend_on_the_others(key: int, tokens: set[int]) -> None:
    listed = sorted(tokens)
    assert torch.equal(noise.gumbel(key, torch.tensor(listed)), noise.gumbel(key, 4_096)[listed])


@fixed
@given(finite_somewhere, st.integers(0, 1000))
def test_the_choice_stays_when_others_leave_the_support(values: list[float], seed: int) -> None:
    """Narrowing the support around a choice cannot change it: its noise stays what it was."""
    row = row_of(values)
    wide = sampler_of(SamplingParams(), seed=seed)
    token = wide.choose(row, [])
    for top_k in range(1, VOCABULARY):
        narrow = sampler_of(SamplingParams(top_k=top_k), seed=seed)
        support = narrow.support(row, [])
        if token in support.ids.tolist():
            assert narrow.choose(row, []) == token


def units(made: list[tuple[int, ...]]) -> np.ndarray:
    """[keys, 16]: the uniform numbers of the Gumbel noise of 16 tokens."""
    gumbel = torch.stack([noise.gumbel(noise.key(*parts), 16) for parts in made])
    return torch.exp(-torch.exp(-gumbel)).numpy()


KEYS = {
    "seed": [(i, 0, 5, noise.MATCH) for i in range(3_000)],
    "choice": [(7, i, 5, noise.MATCH) for i in range(3_000)],
    "position": [(7, 0, i, noise.MATCH) for i in range(3_000)],
}


@pytest.mark.parametrize("varied", KEYS)
def test_noise_is_uniform_and_independent(varied: str) -> None:
    numbers = units(KEYS[varied])
    histogram = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert stats.chisquare(histogram).pvalue > PASSES
    # Between tokens, and between neighbouring keys: 496 correlations, so that 5.5 sigma leaves 2e-5 for chance.
    bound = 5.5 / math.sqrt(len(numbers))
    between = np.corrcoef(numbers[:-1].T, numbers[1:].T)
    assert np.abs(between - np.eye(32)).max() < bound
    # Pairs of neighbouring keys fill the square evenly: correlation alone would miss a lattice.
    square = np.histogram2d(numbers[:-1:2, 0], numbers[1::2, 0], bins=8, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(square.ravel()).pvalue > PASSES


def test_uniform_numbers_are_uniform_and_purposes_do_not_mix() -> None:
    streams = np.array(
        [[noise.uniform(noise.key(9, 0, position, 1, purpose)) for position in range(5_000)] for purpose in range(1, 5)]
    )
    for stream in streams:
        assert stats.kstest(stream, "uniform").pvalue > PASSES
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 4.5 / math.sqrt(5_000)  # 6 of them: 4e-5 for chance


@fixed
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 99), st.integers(0, 10**6)), unique=True))
def test_different_purposes_have_different_keys(parts: list[tuple[int, int, int]]) -> None:
    made = [noise.key(*p, purpose) for p in parts for purpose in (noise.MATCH, noise.DRAFT, noise.ACCEPT)]
    assert len(set(made)) == len(made)
