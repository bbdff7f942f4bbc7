"""Intervals: how often they contain the truth, what they find, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from slipstream.bench.intervals import Bootstrap, Interval, student

CATEGORIES = 11
# Speed-ups of categories and of prompts within them, and noise of a measurement, as logarithms.
BETWEEN, WITHIN, NOISE = 0.35, 0.2, 0.05


def measured(
    rng: np.random.Generator, each: int, gains: np.ndarray, slower: float = 1.0, noise: float = NOISE
) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """Categories, tokens, milliseconds of plain decoding and of a drafter, by prompt."""
    strata = [category for category in range(len(gains)) for _ in range(each)]
    tokens = rng.integers(40, 129, len(strata)).astype(float)
    speed = gains[strata] + WITHIN * rng.standard_normal(len(strata))
    plain = 12.0 * tokens * np.exp(noise * rng.standard_normal(len(strata)))
    drafted = 12.0 * tokens * slower * np.exp(-speed + noise * rng.standard_normal(len(strata)))
    return strata, tokens, plain, drafted


def speedup(strata: list[int], tokens: np.ndarray, plain: np.ndarray, drafted: np.ndarray, seed: int = 0) -> Interval:
    return Bootstrap(strata, seed=seed).ratio_of_ratios((tokens, drafted), (tokens, plain))


def truth(gains: np.ndarray) -> float:
    """The ratio of expected times: a category's mean time is that of a lognormal."""
    means = np.exp(-gains + (WITHIN**2 + NOISE**2) / 2)
    return float(np.exp(NOISE**2 / 2) / means.mean())


@pytest.mark.parametrize(("categories", "each"), [(CATEGORIES, 3), (CATEGORIES, 8), (1, 4), (1, 16)])
def test_intervals_contain_the_truth_as_often_as_they_say(categories: int, each: int) -> None:
    rng = np.random.default_rng(1)
    gains = 0.5 + BETWEEN * np.linspace(-1, 1, categories) if categories > 1 else np.array([0.5])
    expected, runs = truth(gains), 400
    hits = 0
    for run in range(runs):
        found = speedup(*measured(rng, each, gains), seed=run)
        assert found.low is not None and found.high is not None
        hits += found.low <= expected <= found.high
    assert 0.915 <= hits / runs <= 0.99, hits / runs  # 95%, give or take what 400 runs leave open


def test_a_slowdown_of_ten_percent_is_found() -> None:
    """Two runs of 44 prompts each, the second slower: the paired change shows it in nearly all of 50 repetitions."""
    rng = np.random.default_rng(2)
    gains = 0.5 + BETWEEN * np.linspace(-1, 1, CATEGORIES)
    found = 0
    for run in range(50):
        strata, tokens, _plain, first = measured(rng, 4, gains)
        second = first * 1.10 * np.exp(NOISE * rng.standard_normal(len(first)))
        change = Bootstrap(strata, seed=run).ratio_of_ratios((tokens, second), (tokens, first))
        found += change.below_one
    assert found >= 48


def test_two_runs_overlap() -> None:
    rng = np.random.default_rng(3)
    gains = 0.5 + BETWEEN * np.linspace(-1, 1, CATEGORIES)
    overlaps = 0
    for run in range(50):
        first, second = (speedup(*measured(rng, 4, gains), seed=run) for _ in range(2))
        assert first.low and first.high and second.low and second.high
        overlaps += first.low <= second.high and second.low <= first.high
    assert overlaps >= 48


def test_pairing_cancels_what_both_share() -> None:
    """Prompts whose lengths vary by a factor of ten: unpaired, the interval would be as wide as their spread."""
    rng = np.random.default_rng(4)
    ms = 100 * np.exp(rng.standard_normal(40))
    same = Bootstrap([0] * 40).ratio_of_ratios((ms, ms / 2), (ms, ms))
    assert same == pytest.approx((2.0, 2.0, 2.0))


def test_strata_take_out_what_categories_explain() -> None:
    rng = np.random.default_rng(5)
    gains = np.linspace(0.0, 1.5, CATEGORIES)
    strata, tokens, plain, drafted = measured(rng, 4, gains)
    with_them = speedup(strata, tokens, plain, drafted)
    without = speedup([0] * len(strata), tokens, plain, drafted)
    assert with_them.spread < 0.7 * without.spread


def test_a_category_counts_by_its_share() -> None:
    """Nine of ten prompts of the file are slow ones, of which as many were measured as of the fast ones."""
    tokens, ms = np.full(10, 100.0), np.array([1000.0] * 5 + [200.0] * 5)
    strata = ["slow"] * 5 + ["fast"] * 5
    shares = np.array([0.9 / 5] * 5 + [0.1 / 5] * 5)
    even = Bootstrap(strata).ratio(tokens, ms)
    assert even.value == pytest.approx(100 / 600)
    assert Bootstrap(strata, shares).ratio(tokens, ms).value == pytest.approx(100 / 920)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_prompts_have_no_interval(count: int) -> None:
    found = Bootstrap(["a"] * count).ratio(np.array([2.0, 3.0][:count]), np.array([1.0, 1.5][:count]))
    assert found == (2.0, None, None) and found.spread == float("inf")


def test_categories_of_one_prompt_are_drawn_together() -> None:
    rng = np.random.default_rng(6)
    gains = 0.5 + BETWEEN * np.linspace(-1, 1, CATEGORIES)
    found = speedup(*measured(rng, 1, gains))
    assert found.low is not None and found.spread > 0.05


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 100])
def test_quantiles_are_those_of_student(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)
