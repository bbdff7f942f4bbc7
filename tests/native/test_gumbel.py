"""Noise by our own CPU kernels: the choice is that of `noise.py` and `sampling.py`, for any logits and any key."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import gumbel_max, noise
from slipstream.drafters.growing.likeliest import likeliest_children
from slipstream.native import kernels, small
from slipstream.native.compiler import Library
from slipstream.native.machine import Machine, machine
from slipstream.sampling import Sampler, largest
from slipstream.types import SamplingParams

pytestmark = pytest.mark.skipif(machine() is None, reason="no kernels of our own on this machine")

_MASK = 0xFFFFFFFF
_KEPT: list[Library] = []


def forget_kernels() -> None:
    """The next kernels requested are compiled again; calls with addresses of the former ones keep working."""
    _KEPT.extend(cached() for cached in (kernels.noise, kernels.float32) if cached.cache_info().currsize)
    for cached in (kernels.noise, kernels.float32, small._draw, small._perturb, small._top):
        cached.cache_clear()


@pytest.fixture(
    scope="module",
    params=[
        None,
        Machine(8, 6, int8=False, vnni=False, piece=128, few_rows_sums=12),
        Machine(4, 8, int8=False, vnni=False),
    ],
    ids=["own", "8", "4"],
)
def lanes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels as other processors get them, too: their vectors are shorter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            patch.setattr(kernels, "machine", lambda: request.param)
        forget_kernels()
        yield kernels.here().lanes
    forget_kernels()


def defined(logits: torch.Tensor, temperature: float, key: int, ids: torch.Tensor | None = None) -> int:
    """The index that the definition chooses."""
    scaled = logits / torch.full((), temperature)
    return largest(scaled.double() + noise.gumbel(key, len(logits) if ids is None else ids))


def token_with(bits: int, key: int) -> int:
    """The token whose hash under a key is `bits`."""

    def unmixed(x: int) -> int:
        x ^= x >> 16
        x = x * pow(0x846CA68B, -1, 1 << 32) & _MASK
        x ^= x >> 15 ^ x >> 30
        x = x * pow(0x7FEB352D, -1, 1 << 32) & _MASK
        return x ^ x >> 16

    return unmixed((unmixed(bits) - (key >> 32)) & _MASK) ^ key & _MASK


TEMPERATURES = st.sampled_from([1e-30, 1e-3, 0.05, 0.3, 0.7, 1.0, 1.5, 10.0, 1e6])
SPREADS = st.sampled_from([0.0, 1e-6, 0.3, 4.0, 50.0, 1e4, 1e30])


@given(st.integers(1, 400), st.integers(0, 2**31), st.integers(0, 2**64 - 1), TEMPERATURES, SPREADS, st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_draw_is_what_is_defined_or_is_left_open(
    lanes: int, count: int, seed: int, key: int, temperature: float, spread: float, listed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator) * spread
    ids = torch.randperm(3 * count, generator=generator)[:count].sort().values if listed else None
    found = small.drawn(logits, temperature, key, ids)
    assert found in (None, defined(logits, temperature, key, ids))
    if spread <= 50.0 and 0.05 <= temperature <= 10.0:
        assert found is not None


@given(st.integers(1, 90), st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_ties_and_numbers_that_are_not_finite_have_the_defined_choice(
    lanes: int, count: int, data: st.DataObject
) -> None:
    numbers = st.sampled_from([0.0, 0.25, 3.0, 3.0e9, 2.0**100, -math.inf, -math.inf, math.inf, math.nan])
    logits = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)))
    key, temperature = data.draw(st.integers(0, 2**64 - 1)), data.draw(TEMPERATURES)
    found = small.drawn(logits, temperature, key)
    assert found in (None, defined(logits, temperature, key))


@pytest.mark.parametrize("count", [49_152, 49_153, 151_936, 1 << 20])
def test_a_draw_from_a_whole_vocabulary(lanes: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for number, spread in enumerate((0.0, 0.5, 2.0, 5.0, 20.0)):
        logits, key = torch.randn(count, generator=generator) * spread, noise.key(number, 5)
        for rising in (logits, logits.sort().values, logits.sort(descending=True).values):
            assert small.drawn(rising, 0.7, key) == defined(rising, 0.7, key)


def test_two_that_are_too_near_each_other_are_left_to_the_library(lanes: int) -> None:
    logits = torch.full((200,), -5.0)
    logits[17] = logits[150] = 2.0**60  # noise is lost in float64
    assert small.drawn(logits, 1.0, 7) is None
    assert small.drawn(torch.full((9,), -math.inf), 1.0, 7) is None
    for unknown in (math.nan, math.inf):
        assert small.drawn(torch.tensor([0.0] * 20 + [unknown] + [0.0] * 30), 1.0, 7) is None


EXTREMES = [0, 1, 2, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 0xB504F332, 0xB504F333, 0xB504F334, 0xB504F335, 0xC0000000]
EXTREMES += [_MASK - (1 << power) for power in range(32)] + [_MASK]


def test_extreme_hashes(lanes: int) -> None:
    key = noise.key(3, 1, 4)
    ids = torch.tensor([token_with(bits, key) for bits in EXTREMES])
    noises = noise.gumbel(key, ids)
    assert float(noises.max()) > 22.0 and float(noises.min()) < -3.0
    for level in np.linspace(-1.0, 1.0, 21):
        logits = (-noises * (1.0 + level / 100)).float()  # scores near zero: which is the largest depends on the noise
        assert small.drawn(logits, 1.0, key, ids) == defined(logits, 1.0, key, ids)
    fill = -len(ids) % lanes
    ids = torch.cat([ids, torch.arange(fill)])
    scores = noise.gumbel(key, ids)
    logits = (-0.9 * scores).float()
    places, shares = small.top_probabilities(small.perturbed(logits[None], 1.0, [key], ids), len(ids))
    wanted = torch.softmax(logits.double() + scores, 0).numpy()
    np.testing.assert_allclose(shares[0], wanted[places[0]], rtol=1e-5)
    assert sorted(places[0].tolist()) == list(range(len(ids)))


@pytest.mark.parametrize("listed", [False, True])
def test_the_likeliest_with_noise(lanes: int, listed: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(5, 640, generator=generator) * 3)[:, :320]  # rows lie apart
    ids = torch.randperm(4000, generator=generator)[:320].sort().values if listed else None
    keys = [noise.key(row, 9) for row in range(5)]
    places, shares = small.top_probabilities(small.perturbed(logits, 0.7, keys, ids), 6)
    for row, key in enumerate(keys):
        scores = logits[row].double() / 0.7 + noise.gumbel(key, 320 if ids is None else ids)
        top = torch.topk(torch.softmax(scores, 0), 6)
        assert places[row].tolist() == top.indices.tolist()
        np.testing.assert_allclose(shares[row], top.values.numpy(), rtol=1e-5)


# -- what requests and drafters get -----------------------------------------------------------------------------------

REQUESTS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]


def sampler_of(wants: dict[str, float], seed: int) -> Sampler:
    return Sampler(SamplingParams(**wants), seed, 0, [1, 2, 3], [4, 5], end_ids=())  # type: ignore[arg-type]


@pytest.mark.parametrize("wants", REQUESTS, ids=str)
def test_a_sampler_chooses_the_same_without_kernels(wants: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(40, 1001, generator=torch.Generator().manual_seed(1)) * 4
    rows[::3, ::2] = -math.inf

    def chosen() -> list[int]:
        return [sampler_of(wants, seed).choose(row, [6] * (seed % 3)) for seed, row in enumerate(rows)]

    calls = []
    by_kernel = small.drawn
    monkeypatch.setattr(small, "drawn", lambda *operands: calls.append(1) or by_kernel(*operands))
    with_kernels = chosen()
    assert len(calls) > len(rows) // 2  # where more than one token is left
    monkeypatch.setattr(gumbel_max, "kernels_work", lambda: False)
    assert chosen() == with_kernels


@pytest.mark.parametrize(
    ("wants", "listed"),
    [
        (wants, listed)
        for wants in ({"temperature": 0.0}, *REQUESTS)
        for listed in ((False, True) if "repetition_penalty" not in wants else (False,))  # logits are widened then
    ],
    ids=str,
)
@pytest.mark.parametrize("noisy", [False, True])
def test_drafters_get_the_same_children_without_kernels(
    wants: dict[str, float], listed: bool, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(3, 512, generator=generator) * 3
    ids = torch.randperm(3000, generator=generator)[:512].sort().values if listed else None
    sampler, paths = sampler_of(wants, 11), [[], [6], [6, 8]]
    found = likeliest_children(sampler, rows, paths, 4, ids, noisy=noisy)
    monkeypatch.setattr(gumbel_max, "kernels_work", lambda: False)
    wanted = likeliest_children(sampler, rows, paths, 4, ids, noisy=noisy)
    for children, expected in zip(found, wanted, strict=True):
        assert [token for token, _ in children] == [token for token, _ in expected]
        assert [share for _, share in children] == pytest.approx([share for _, share in expected], rel=1e-5)


def test_children_that_cannot_be_chosen_are_no_candidates_and_nan_stays_visible() -> None:
    row = torch.full((1, 64), -math.inf)
    row[0, 5] = 1.0
    for wants in ({"temperature": 0.0}, {"temperature": 0.7}):
        assert likeliest_children(sampler_of(wants, 1), row, [[]], 4) == [[(5, 1.0)]]
        unknown = likeliest_children(sampler_of(wants, 1), torch.full((1, 64), math.nan), [[]], 4)
        assert all(math.isnan(share) for _, share in unknown[0]) and unknown[0]


def test_kernels_that_choose_something_else_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    gumbel_max.kernels_work.cache_clear()
    monkeypatch.setattr(small, "drawn", lambda *_: 3)
    try:
        assert not gumbel_max.kernels_work()
    finally:
        gumbel_max.kernels_work.cache_clear()
