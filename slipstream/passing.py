"""What a layer does between its products, in as few kernels as can be, for passes on a GPU.

A norm without weights only scales rows, and a product keeps the scale of a row. So the rows go into the product as they
are, and what comes out is scaled by whoever reads it next: the norm costs no kernel of its own, and no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from slipstream.fused import runs_fused


class Late(NamedTuple):
    """A norm that is still to be applied to a product: row r by factor / sqrt(|rows[r]|^2 + floor)."""

    rows: torch.Tensor  # [rows, width]: what went into the product
    floor: float
    factor: float


class Turned(NamedTuple):
    """Where rows stand: how they turn, and where their k and v are kept."""

    table: torch.Tensor  # complex [positions, size / 2]: the rotation of every position
    positions: torch.Tensor  # int64 [rows], and so are those below
    pages: torch.Tensor
    offsets: torch.Tensor  # rows in the pages


def turn_and_keep(
    qkv: torch.Tensor,
    rows: Turned,
    both: torch.Tensor,
    heads: int,
    late: Late | None,
    bias: torch.Tensor | None = None,
) -> None:
    """Turn q in place, and put k, turned, and v into a layer of a store.

    qkv [rows, (heads + 2 * kv heads) * size], pairs that turn together side by side; both [2, pages, kv heads, page
    size, size]. `bias`, of the width of qkv, is added first, behind the norm.
    """
    from slipstream import pass_kernels

    pass_kernels.turn_and_keep(qkv, rows, both, heads, late, bias)


def late_gate(both: torch.Tensor, late: Late) -> torch.Tensor:
    """silu of the first half of each row times the second half, scaled first: [rows, 2n] -> [rows, n]."""
    from slipstream import pass_kernels

    return pass_kernels.late_gate(both, late)


def normed(parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
    """One or two kinds of rows [rows, width] under RMS norms of their own, side by side: [rows, kinds * width]."""
    if runs_fused(parts[0]):
        from slipstream import pass_kernels

        return pass_kernels.normed(parts, weights, eps)
    each = [functional.rms_norm(x, weight.shape, weight, eps) for x, weight in zip(parts, weights, strict=True)]
    return each[0] if len(each) == 1 else torch.cat(each, -1)
