"""GEMM on a GPU: correct, and a row has the same bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch

from slipstream.models.layers.exact_linear import ExactLinear
from tests.interpreted import DEVICE


@pytest.mark.kernels
def test_a_row_has_the_same_bits_in_any_batch(fresh_memory_is_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.gpu.kernels import exact_kernels

    torch.manual_seed(0)
    kinds = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
    monkeypatch.setattr(exact_kernels, "_ROWS", 128)  # more than that go in turns

    def near(found, expected, kind):
        bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[kind]
        assert (found.double() - expected).abs().max() <= bound * expected.abs().max()

    for kind in kinds:
        # Inner widths and outputs that fill tiles and that do not, one share and several.
        for inner, outer, biased in ((100, 40, True), (576, 130, False)):
            weight, x, total = (
                torch.randn(*shape, device=DEVICE).to(kind) / 4
                for shape in ((outer, inner), (150, inner), (150, outer))
            )
            bias = torch.randn(outer, device=DEVICE).to(kind) if biased else None
            linear = ExactLinear(weight, bias)
            assert linear.exact and linear.biased == biased
            right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            whole, onto = linear(x), linear.onto(total, x)
            near(whole, right, kind)
            near(onto, right + total.double(), kind)
            mine = total.clone()
            linear.onto_(mine, x)
            assert torch.equal(mine, onto)
            for rows in (slice(0, 1), slice(7, 8), slice(149, 150), slice(3, 5), slice(1, 129)):
                assert torch.equal(linear(x[rows]), whole[rows]), (kind, inner, outer, rows)
                assert torch.equal(linear.onto(total[rows], x[rows]), onto[rows])
            assert linear(x[:0]).shape == (0, outer)

    half = exact_kernels.cut_of(torch.bfloat16)
    shapes = {(6144, 4096): 5, (4096, 4096): 8, (28672, 4096): 1, (4096, 14336): 8, (128256, 4096): 1, (64, 64): 1}
    assert {shape: exact_kernels.shares_of(*shape, half) for shape in shapes} == shapes
