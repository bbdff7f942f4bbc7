"""Products of large matrices with the rows of a tree, whose kernel does what follows as well: on recent GPUs.

For one row the library's products are the best there are. For the 64 rows of a large tree they take a tenth longer, and
the gates behind them are one more kernel that reads and writes rows.
"""

from __future__ import annotations

import functools

import torch

from slipstream.fused import runs_fused

_ROWS = 64  # no more, and no fewer: rows that are missing in a block make copying it slow
_LEAST_NUMBERS = 1 << 25  # of a matrix: smaller ones have too few columns to keep every part of a large GPU busy
_CAPABILITY = (9, 0)  # from which on the hardware copies blocks by itself


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product of rows x [rows, in] with a matrix [out, in] is better made here."""
    return (
        len(x) == _ROWS
        and weight.numel() >= _LEAST_NUMBERS
        and x.dtype == weight.dtype == torch.bfloat16
        and weight.shape[1] % 8 == 0  # rows begin at 16 bytes
        and x.is_contiguous()
        and weight.is_contiguous()
        and runs_fused(x)
        and _copies_blocks(x.device)
    )


@functools.cache
def _copies_blocks(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def gates(x: torch.Tensor, weight: torch.Tensor, floor: float, factor: float) -> torch.Tensor:
    """silu(a) * b of the halves a and b of each row's product with [2n, in], scaled first: [rows, in] -> [rows, n].

    Row r is scaled by factor / sqrt(|x[r]|^2 + floor), which is a norm.
    """
    from slipstream import product_kernels

    return product_kernels.gates(x, weight, floor, factor)


def onto_(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Add to total [rows, out] the product of x [rows, in] with [out, in]."""
    from slipstream import product_kernels

    product_kernels.onto_(total, x, weight)
