"""The operations of a layer between its GEMMs, in as few kernels as possible, for passes on a GPU.

A norm without weights only scales rows, and a GEMM preserves the scale of a row. So rows enter the GEMM unnormalised,
and the next kernel scales its output: the norm costs no kernel of its own, and no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from slipstream.gpu.fused import runs_fused


class DeferredNorm(NamedTuple):
    """A norm still to be applied to the output of a GEMM: row r is scaled by factor / sqrt(|rows[r]|^2 + floor)."""

    rows: torch.Tensor  # [rows, width]: the input of the GEMM
    floor: float
    factor: float


class RowPlacement(NamedTuple):
    """Where rows are: their rotations, and where their k and v are stored."""

    table: torch.Tensor  # complex [positions, size / 2]: the rotation of every position
    positions: torch.Tensor  # int64 [rows], as those below
    pages: torch.Tensor
    offsets: torch.Tensor  # rows in the pages


def rotate_and_store(
    qkv: torch.Tensor,
    rows: RowPlacement,
    both: torch.Tensor,
    heads: int,
    deferred: DeferredNorm | None,
    bias: torch.Tensor | None = None,
) -> None:
    """Rotate q in place, and write k, rotated, and v to a layer of a store.

    qkv [rows, (heads + 2 * kv heads) * size], with rotated pairs side by side; both [2, pages, kv heads, page size,
    size]. `bias`, of the width of qkv, is added first, after the norm.
    """
    from slipstream.gpu.kernels import layer_kernels

    layer_kernels.rotate_and_store(qkv, rows, both, heads, deferred, bias)


def deferred_gate(both: torch.Tensor, deferred: DeferredNorm) -> torch.Tensor:
    """silu of the first half of each row times the second half, scaled first: [rows, 2n] -> [rows, n]."""
    from slipstream.gpu.kernels import layer_kernels

    return layer_kernels.deferred_gate(both, deferred)


def normed(parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
    """One or two kinds of rows [rows, width] with RMS norms of their own, side by side: [rows, kinds * width]."""
    if runs_fused(parts[0]):
        from slipstream.gpu.kernels import layer_kernels

        return layer_kernels.normed(parts, weights, eps)
    each = [functional.rms_norm(x, weight.shape, weight, eps) for x, weight in zip(parts, weights, strict=True)]
    return each[0] if len(each) == 1 else torch.cat(each, -1)
