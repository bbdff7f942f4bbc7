"""GEMM with 8-bit and 4-bit weights: nearly the exact product, and batch-invariant, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from slipstream.models.layers import quantized
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.quantized import Int4Linear, Int8Linear, Int8Matrix, quantized_linear

MODES = ["int8", "int4"]
# What the numbers of a weight lose: 8 bits with a scale a row, 4 bits with a grid for each 32.
CLOSE = {"int8": 0.01, "int4": 0.12}


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def assert_rows_alone(product: Linear, x: torch.Tensor, counts: list[int]) -> None:
    """A row has the same bits alone and at any place among any number of rows."""
    alone = torch.cat([product(row) for row in x.split(1)])
    for count in counts:
        assert torch.equal(product(x[:count].contiguous()), alone[:count]), count
    assert torch.equal(product(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
def test_a_row_has_the_same_bits_in_any_batch(mode: str, seed: int, threads: int) -> None:
    """Any widths, any number of rows from 1 to 64, rows of any size."""
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inner, outer = chooser.randrange(1, 1600), chooser.randrange(1, 1600)
    weight = torch.randn(outer, inner, generator=generator)
    x = torch.randn(64, inner, generator=generator) * 10 ** torch.randn(64, 1, generator=generator)
    bias, columns = torch.randn(outer, generator=generator), torch.rand(inner, generator=generator) + 0.5
    product = quantized_linear(mode, weight, bias, columns)
    assert_rows_alone(product, x, chooser.sample(range(1, 65), 9))
    wanted = (x * columns) @ weight.T + bias
    assert relative_error(product(x), wanted) < CLOSE[mode]


@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (576, 3072), (1536, 576), (64, 40_000)])
@pytest.mark.parametrize("mode", MODES)
def test_shapes_of_real_models(mode: str, inner: int, outer: int) -> None:
    weight, x = torch.randn(outer, inner), torch.randn(70, inner)
    product = quantized_linear(mode, weight)
    assert_rows_alone(product, x, [2, 3, 8, 16, 31, 32, 33, 64])
    assert relative_error(product(x), x @ weight.T) < CLOSE[mode]
    assert product(x[:0]).shape == (0, outer) and product(x).is_contiguous()


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_not_finite_spoils_no_other(mode: str) -> None:
    weight, x = torch.randn(50, 64), torch.randn(9, 64)
    product = quantized_linear(mode, weight)
    x[0] *= 1e6
    x[2], x[3], x[4, 7] = 0.0, float("nan"), float("inf")
    together = product(x)
    for row in (0, 1, 2, 5, 6, 7, 8):
        assert torch.equal(product(x[row : row + 1])[0], together[row]) and together[row].isfinite().all()
    assert torch.equal(together[2], torch.zeros(50))
    assert not together[3].isfinite().any() and not together[4].isfinite().any()


def test_activations_lose_next_to_nothing_beside_8_bit_weights() -> None:
    """An outlier that would leave 8-bit activations nothing for the other numbers."""
    matrix, x = Int8Matrix(torch.randn(300, 576)), torch.randn(8, 576)
    x[:, 11] = 60.0
    weight = matrix[torch.arange(300)]
    wanted = x @ weight.T
    assert relative_error(Int8Linear(matrix)(x), wanted) < 0.003
    assert relative_error((x / 60 * 127).round() * 60 / 127 @ weight.T, wanted) > 0.02


@pytest.mark.parametrize("inner", [576, 20_000, 60_000])
def test_no_sum_overflows(inner: int) -> None:
    """All weights and all activations as large as they can be, with the same and with opposite signs."""
    for sign in (1.0, -1.0):
        product = Int8Linear(Int8Matrix(torch.full((40, inner), sign)))
        torch.testing.assert_close(product(torch.ones(3, inner)), torch.full((3, 40), sign * inner))
        torch.testing.assert_close(product(torch.ones(50, inner)), torch.full((50, 40), sign * inner))


def test_a_matrix_serves_as_a_table() -> None:
    weight = torch.randn(5000, 48) * torch.rand(5000, 1)
    weight[7] = 0.0
    matrix, ids = Int8Matrix(weight), torch.tensor([4999, 7, 0, 4096, 7])
    error = (matrix[ids] - weight[ids]).abs().amax(1)
    assert bool((error <= weight[ids].abs().amax(1) / 253).all()) and not matrix[ids][1].any()
    one = torch.eye(48)
    torch.testing.assert_close(Int8Linear(matrix)(one).T, matrix[torch.arange(5000)])


def test_weights_of_a_4_bit_file_keep_their_values() -> None:
    """Groups of 32 on a grid of 16 values, of which the least and the largest occur: what Q4_1 stores."""
    codes = torch.randint(0, 16, (64, 9, 32))
    codes[:, :, 3], codes[:, :, 30] = 0, 15
    scale = 2.0 ** torch.randint(-6, 0, (64, 9, 1)) * torch.randint(128, 256, (64, 9, 1)) / 128
    weight = ((codes - torch.randint(0, 16, (64, 9, 1))) * scale).flatten(1)
    kept = Int4Linear(weight)(torch.eye(288)).T
    steps = (kept - weight).unflatten(1, (9, 32)).abs() / scale
    assert steps.max() < 0.1  # the grid and the result are rounded to bfloat16; a lost value is half a step away
    moved = weight * (1 + torch.rand(288))  # a norm's weight, folded in
    assert relative_error(Int4Linear(moved)(torch.eye(288)).T, moved) > 0.03 > relative_error(kept, weight)


def test_where_pairs_of_products_are_cut_off_weights_are_smaller() -> None:
    """A CPU without instructions for 8-bit GEMM, as far as oneDNN knows: its kernels saturate."""
    script = """
import torch
from slipstream.models.layers.quantized import Int8Linear, Int8Matrix, int8_levels
weight, x = torch.randn(200, 320), torch.randn(40, 320)
weight[:, ::2], x[:, ::2] = weight[:, ::2].abs() + 3, x[:, ::2].abs() + 3
product = Int8Linear(Int8Matrix(weight))
found, wanted = product(x), x @ weight.T
assert (found - wanted).norm() < 0.01 * wanted.norm(), found
assert torch.equal(found, torch.cat([product(row) for row in x.split(1)]))
print(int8_levels())
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    if torch.cpu._is_vnni_supported():
        assert int(done.stdout) == 63 and quantized.int8_levels() == 127
    else:
        assert int(done.stdout) == quantized.int8_levels() > 0


def test_wrong_sums_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda x, y: right(x, y).clamp_(max=32_767))
    quantized.int8_levels.cache_clear()
    try:
        assert quantized.int8_levels() == 0
    finally:
        quantized.int8_levels.cache_clear()
