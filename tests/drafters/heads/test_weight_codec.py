"""Quantized weights: the round trip is nearly exact, in the promised number of bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.heads.weight_codec import SCALE, SIX, packed, unpacked


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([6, 8]))
@settings(max_examples=60, deadline=None)
def test_weights_come_back(rows: int, columns: int, seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10 ** torch.randint(
        -4, 4, (rows, 1), generator=generator
    )
    weight[0] = 0.0
    norm = torch.randn(columns, generator=generator)
    back = unpacked(packed({"a": weight, "norm": norm}, bits))
    assert back.keys() == {"a", "norm"} and back["a"].dtype == torch.float32
    step = weight.abs().amax(1) / (31 if bits == 6 and columns % 4 == 0 else 127)
    wrong = (back["a"] - weight).square().mean(1).sqrt()
    assert (wrong <= 0.5001 * step).all()  # as if nothing had been cut off, or less
    assert torch.equal(back["norm"], norm.bfloat16().float())


@pytest.mark.parametrize(("bits", "each"), [(6, 0.75), (8, 1.0)])
def test_a_weight_takes_its_bits(bits: int, each: float) -> None:
    stored = packed({"a": torch.randn(64, 96)}, bits)
    codes = sum(tensor.nbytes for tensor in stored.values() if tensor.dtype in (torch.uint8, torch.int8))
    assert codes == each * 64 * 96
    assert sum(tensor.nbytes for tensor in stored.values()) == codes + 64 * 4


def test_six_bits_are_better_for_cutting_off_the_largest() -> None:
    weight = torch.randn(200, 576, generator=torch.Generator().manual_seed(0))
    wrong = (unpacked(packed({"a": weight}, 6))["a"] - weight).square().mean().sqrt()
    whole = weight.abs().amax(1, keepdim=True) / 31
    assert float(wrong) < 0.99 * float(((weight / whole).round() * whole - weight).square().mean().sqrt())


def test_a_matrix_with_a_few_large_numbers_has_eight_bits_among_others_that_have_six() -> None:
    torch.manual_seed(0)
    weights = {"spread": torch.randn(48, 48), "spiked": 0.01 * torch.randn(48, 48) + torch.eye(48)}
    stored = packed(weights, 6)
    assert stored.keys() == {"spread" + SIX, "spread" + SCALE, "spiked", "spiked" + SCALE}
    back = unpacked(stored)
    for name, weight in weights.items():
        assert (back[name] - weight).norm() < 0.06 * weight.norm()


def test_what_was_stored_once_is_stored_again_without_loss() -> None:
    once = unpacked(packed({"a": torch.randn(20, 48)}, 6))
    again = unpacked(packed(once, 6))
    assert torch.allclose(once["a"], again["a"], rtol=1e-5, atol=0)
