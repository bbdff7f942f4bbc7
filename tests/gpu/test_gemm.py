"""GEMM with fused epilogues: they give what the plain operations give, and when they are used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slipstream.gpu import gemm
from tests.interpreted import DEVICE


@pytest.mark.kernels
def test_the_kernels_do_what_the_plain_operations_do() -> None:
    from slipstream.gpu.kernels import gemm_kernels as kernels

    torch.manual_seed(0)
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float16

    def near(found, expected):
        assert (found.float() - expected).abs().max() <= 1e-2 * expected.abs().max(), (rows, inner, width)

    shapes = (64, 320, 200), (17, 512, 64), (33, 1000, 4100), (64, 1536, 72), (5, 256, 2048), (64, 256, 1344)
    for rows, inner, width in shapes:
        x = torch.randn(rows, inner, device=DEVICE).to(kind)
        w = (torch.randn(2 * width, inner, device=DEVICE) / inner**0.5).to(kind)
        scale = 1.7 / (x.float().square().sum(1, keepdim=True) + 0.3).sqrt()
        gate, value = ((x.float() @ w.float().T) * scale).chunk(2, 1)
        expected = functional.silu(gate) * value
        found = kernels.gates(x, w, 0.3, 1.7)
        near(found, expected)
        total = torch.randn(rows, 2 * width, device=DEVICE).to(kind)
        expected = total.float() + x.float() @ w.float().T
        for _ in range(2):
            mine = total.clone()
            kernels.onto_(mine, x, w)
            near(mine, expected)
        if inner % 512 == 0 and width % 8 == 0:
            alone = x[:1]
            gate, value = ((alone.float() @ w.float().T) * scale[:1]).chunk(2, 1)
            near(kernels.row_gates(alone, w, 0.3, 1.7), functional.silu(gate) * value)
            mine = total[:1].clone()
            kernels.row_onto_(mine, alone, w)
            near(mine, expected[:1])


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_they_are_for_gpus_alone() -> None:
    assert not gemm.pays(made(64, 8192), made(8192, 8192))


def test_where_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "runs_fused", lambda x: True)
    monkeypatch.setattr(gemm, "_tried", lambda device: True)
    assert all(gemm.pays(made(rows, 4096), made(28672, 4096)) for rows in (1, 64))
    assert gemm.pays(made(1, 14336), made(4096, 14336))
    assert gemm.pays(made(1, 4096), made(4096, 4096)), "one row pays with smaller matrices than a tree does"
    assert not gemm.pays(made(64, 4096), made(4096, 4096))
    for rows in (2, 17, 63, 65, 128):
        assert not gemm.pays(made(rows, 4096), made(28672, 4096)), rows
    for x, weight in (
        (made(1, 4096), made(1024, 4096)),  # small
        (made(1, 8960), made(4096, 8960)),  # an inner side that one program cannot take in whole pieces
        (made(1, 4096), made(28680, 4096)),  # gates and values that are no whole pieces each
        (made(1, 4096, dtype=torch.float32), made(28672, 4096, dtype=torch.float32)),
        (made(64, 8192)[:, ::2], made(28672, 4096)),
        (made(64, 4096), made(4096, 28672).T),
    ):
        assert not gemm.pays(x, weight), (x.shape, weight.shape)


@pytest.mark.kernels
def test_the_sides_that_pay_are_whole_pieces_of_what_a_program_takes() -> None:
    from slipstream.gpu.kernels import gemm_kernels as kernels

    assert gemm._INNER % kernels.ROW_INNER == 0 and gemm._OUTER % (2 * kernels.ROW_COLUMNS) == 0
    assert gemm._TREE == kernels.ROWS
