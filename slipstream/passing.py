"""What a layer does between its products, in as few kernels as can be, for passes on a GPU.

A norm without weights only scales rows, and a product keeps the scale of a row. So the rows go into the product as they
are, and what comes out is scaled by whoever reads it next: the norm costs no kernel of its own, and no rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from slipstream.fused import runs_fused


class Late(NamedTuple):
    """A norm that is still to be applied to a product: row r by factor / sqrt(|rows[r]|^2 + floor)."""

    rows: torch.Tensor  # [rows, width]: what went into the product
    floor: float
    factor: float


def turn_and_keep(
    qkv: torch.Tensor,
    turns: torch.Tensor,
    both: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    late: Late | None,
    bias: torch.Tensor | None = None,
) -> None:
    """Turn q in place, and put k, turned, and v into a layer of a store.

    qkv [rows, (heads + 2 * kv heads) * size], pairs that turn together side by side; turns complex [rows, size / 2];
    both [2, pages, kv heads, page size, size]; places: pages and rows in them, int64 [rows] each. `bias`, of the width
    of qkv, is added first, behind the norm.
    """
    from slipstream import pass_kernels

    pass_kernels.turn_and_keep(qkv, turns, both, *places, heads, late, bias)


def late_gate(both: torch.Tensor, late: Late) -> torch.Tensor:
    """silu of the first half of each row times the second half, scaled first: [rows, 2n] -> [rows, n]."""
    from slipstream import pass_kernels

    return pass_kernels.late_gate(both, late)


def normed_pair(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Two kinds of rows [rows, width], each under an RMS norm of its own, side by side: [rows, 2 * width]."""
    if runs_fused(first):
        from slipstream import pass_kernels

        return pass_kernels.normed_pair(first, second, first_weight, second_weight, eps)
    parts = ((first, first_weight), (second, second_weight))
    return torch.cat([functional.rms_norm(x, weight.shape, weight, eps) for x, weight in parts], -1)
