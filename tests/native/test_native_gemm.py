"""Our own GEMM for a CPU: correct, and batch-invariant."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.layers.linear import int8_kernels_work, native_works
from slipstream.models.layers.quantized import Int8Linear, Int8Matrix, _on_grids, int4_linear, int8_linear
from slipstream.native import kernels, matrix_unit
from slipstream.native.call import program
from slipstream.native.compiler import Library
from slipstream.native.linear import (
    ADDED,
    GATED,
    WRITTEN,
    FloatLinear,
    Lines,
    NativeInt4Linear,
    NativeInt8Linear,
    NativeLinear,
)
from slipstream.native.machine import Machine, has_amx, machine
from slipstream.native.shape import GROUP

pytestmark = pytest.mark.skipif(machine() is None, reason="no kernels of our own on this machine")
needs_digits = pytest.mark.skipif(not int8_kernels_work(), reason="no kernels for 8-bit products")


@pytest.fixture(
    params=[
        None,
        Machine(8, 6, int8=False, vnni=False, piece=128, few_rows_sums=12),
        Machine(4, 8, int8=False, vnni=False),
    ],
    ids=["own", "8", "4"],
)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Kernels as other processors get them, too: their vectors are shorter."""
    if request.param is not None:
        monkeypatch.setattr(kernels, "machine", lambda: request.param)
    forget_kernels()
    yield kernels.here().lanes
    forget_kernels()


_KEPT: list[Library] = []


def forget_kernels() -> None:
    """The next kernels requested are compiled again; programs with addresses of the former ones keep working."""
    if kernels.float32.cache_info().currsize:
        _KEPT.append(kernels.float32())
    for cached in (kernels.float32, kernels.layers):
        cached.cache_clear()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (70, 48), (960, 576), (33, 1540)])
def test_a_float_gemm_is_the_product(lanes: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    product = FloatLinear(weight, bias)
    for rows in (1, 2, 7, 8, 9, 23):
        x = torch.randn(rows, inputs, generator=generator)
        wanted = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(product(x).double(), wanted, atol=2e-4, rtol=1e-5)


def test_rows_of_a_float_gemm_are_batch_invariant(lanes: int) -> None:
    product, x = FloatLinear(torch.randn(200, 300)), torch.randn(40, 300)  # more inputs than a piece has
    together = product(x)
    for start, stop in ((0, 1), (3, 5), (20, 23), (7, 19), (11, 40), (39, 40)):
        assert torch.equal(product(x[start:stop]), together[start:stop])


@pytest.mark.parametrize("ending", [WRITTEN, ADDED, GATED])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("inputs", [36, 292])
def test_panels_side_by_side_have_the_bits_of_panels_alone(
    ending: str, threads: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, panel = torch.Generator().manual_seed(7), 2 * kernels.here().lanes
    weight, bias = torch.randn(40 * panel, inputs, generator=generator), torch.randn(40 * panel, generator=generator)
    x, start = torch.randn(7, inputs, generator=generator), torch.randn(7, 40 * panel, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for sums in (0, 12):
            monkeypatch.setattr(kernels, "machine", partial(replace, machine(), few_rows_sums=sums))
            forget_kernels()
            results.append([])
            for panels, rows in product((1, 2, 5, 6, 7, 13, 19, 36, 40), range(1, 8)):
                out, count = start[:rows].clone(), np.array([rows])
                part = FloatLinear(weight[: panels * panel], bias[: panels * panel])
                steps = part.steps(count.ctypes.data, Lines.of(x), Lines.of(out), None, ending=ending)
                args = program(steps)
                kernels.float32().run(args.ctypes.data)
                results[-1].append(out)
    finally:
        torch.set_num_threads(before)
        forget_kernels()
    alone, side_by_side = results
    assert all(map(torch.equal, alone, side_by_side))


def test_kernels_are_not_trusted_if_few_rows_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FloatLinear.__call__
    monkeypatch.setattr(FloatLinear, "__call__", lambda product, x: right(product, x) * (1 + 1e-6 * (len(x) == 2)))
    native_works.cache_clear()
    try:
        assert not native_works()
    finally:
        native_works.cache_clear()


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(5, 300)
    product = FloatLinear(torch.randn(64, 100))
    assert torch.equal(product(wide[:, 100:200]), product(wide[:, 100:200].contiguous()))


@needs_digits
@given(st.integers(1, 150), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_an_8_bit_product_has_the_bits_of_the_slow_one(outputs: int, sixteens: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 16 * sixteens, generator=generator)
    bias, columns = torch.randn(outputs, generator=generator), torch.rand(16 * sixteens, generator=generator)
    fast = int8_linear(weight, bias, columns)
    assert isinstance(fast, NativeInt8Linear)
    x = 10 ** torch.randint(-3, 4, (rows, 1), generator=generator) * torch.randn(
        rows, 16 * sixteens, generator=generator
    )
    assert torch.equal(fast(x), Int8Linear(Int8Matrix(weight), bias, columns)(x))


@needs_digits
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(1, 16, 1), (70, 64, 9), (33, 576, 3)])
def test_without_an_instruction_for_them_8_bit_products_have_the_same_bits(
    outputs: int, inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products at a time are summed in 16 bits, which is just enough: for the largest codes and digits, too."""
    plain = replace(kernels.here(), vnni=False)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "machine", lambda: plain)
        patch.setattr(kernels, "has_amx", lambda: False)
        kernels.int8.cache_clear()
        random_weight = torch.randn(outputs, inputs)
        for weight in (random_weight, random_weight.sign(), torch.ones(outputs, inputs), -torch.ones(outputs, inputs)):
            large = torch.full((rows, inputs), 64 / 8127)  # 64 of the lower digit, once the row has a 1
            for x in (torch.randn(rows, inputs), torch.ones(rows, inputs), large, -large):
                x[:, 0] = 1.0
                assert torch.equal(int8_linear(weight)(x), Int8Linear(Int8Matrix(weight))(x))
    kernels.int8.cache_clear()


@needs_digits
@pytest.mark.parametrize("inputs", [64, 192, 576, 1536])
def test_the_matrix_unit_has_the_bits_of_vectors(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.has_amx():
        pytest.skip("no matrix unit")
    weight, bias, x = torch.randn(70, inputs), torch.randn(70), torch.randn(67, inputs)
    by_amx, kept = int8_linear(weight, bias), kernels.int8()  # code goes with its library
    together = by_amx(x)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "has_amx", lambda: False)
        kernels.int8.cache_clear()
        assert torch.equal(int8_linear(weight, bias)(x), together)
    kernels.int8.cache_clear()
    for start, stop in ((0, 1), (1, 3), (0, 8), (5, 14), (20, 36), (30, 47), (3, 67)):
        assert torch.equal(by_amx(x[start:stop]), together[start:stop])
    assert kept["pack"]


@pytest.mark.skipif(not has_amx(), reason="no matrix unit")
def test_a_matrix_unit_that_is_forbidden_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix_unit.matrix_unit_works()
    killed = tmp_path / "trial.py"
    killed.write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setattr(matrix_unit.trial, "__file__", str(killed))
    assert not matrix_unit.matrix_unit_works()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no interpreter"))
    assert not matrix_unit.matrix_unit_works()


@pytest.mark.parametrize("kind", ["float", "8 bits", "4 bits"])
def test_pairing_gates_and_values_changes_no_result(kind: str) -> None:
    if kind != "float" and not int8_kernels_work():
        pytest.skip("no kernels for 8-bit products")
    make = {"float": FloatLinear, "8 bits": int8_linear, "4 bits": int4_linear}[kind]
    generator = torch.Generator().manual_seed(5)
    product = make(torch.randn(192, 96, generator=generator), torch.randn(192, generator=generator))
    x = torch.randn(11, 96, generator=generator)
    before = product(x)
    assert isinstance(product, NativeLinear) and product.can_pair
    for _ in range(2):  # once is enough
        product.pair()
        assert torch.equal(product(x), before)
    assert not FloatLinear(torch.randn(50, 96)).can_pair


@needs_digits
@given(st.integers(1, 100), st.integers(1, 12), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_weights_are_packed_as_they_are_quantised(outputs: int, sixteens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 2 * 16 * sixteens, generator=generator)[:, : 16 * sixteens]  # rows lie apart
    weight[outputs // 2] = 0.0
    packed, ids = int8_linear(weight), torch.arange(outputs)
    assert isinstance(packed, NativeInt8Linear)
    assert torch.equal(packed[ids], Int8Matrix(weight)[ids])


@needs_digits
def test_the_largest_sums_of_8_bit_products_do_not_overflow() -> None:
    for inputs in (576, 4096, 14_336):
        for sign in (1.0, -1.0):
            product, x = int8_linear(torch.full((40, inputs), sign)), torch.ones(20, inputs)
            torch.testing.assert_close(product(x), torch.full((20, 40), sign * inputs), rtol=1e-3, atol=0)


@needs_digits
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    product, x = int8_linear(torch.randn(50, 64)), torch.randn(6, 64)
    wanted = product(x)
    for bad in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[2, 5] = bad
        result = product(spoilt)
        assert not result[2].isfinite().any()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(result[others], wanted[others])


@needs_digits
def test_a_packed_matrix_is_a_table() -> None:
    weight, ids = torch.randn(70, 48), torch.tensor([[3, 69], [0, 33]])
    packed = int8_linear(weight)
    assert isinstance(packed, NativeInt8Linear)
    assert torch.equal(packed[ids], Int8Matrix(weight)[ids])


@needs_digits
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (70, 96), (576, 1536)])
def test_a_4_bit_product_is_that_of_its_grid(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    product = int4_linear(weight, bias)
    assert isinstance(product, NativeInt4Linear)
    codes, scale, offset = _on_grids(weight)
    on_grid = ((codes.view(outputs, -1, GROUP).double() - 8) * scale + offset).flatten(1)
    x = torch.randn(19, inputs, generator=generator)
    result = product(x)
    wanted = x.double() @ on_grid.T + bias.double()
    assert float((result.double() - wanted).norm()) < 0.001 * float(wanted.norm())
    for start, stop in ((0, 1), (3, 8), (5, 19)):
        assert torch.equal(product(x[start:stop]), result[start:stop])
