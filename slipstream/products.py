"""Products of large matrices with one row, or with the rows of a large tree, and what follows: on recent GPUs.

The library's products leave a tenth of the time on the table there, and the gates behind them are one more kernel.
"""

from __future__ import annotations

import functools

import torch

from slipstream.fused import runs_fused

_ROW, _TREE = 1, 64  # rows: no others. Where rows are missing in a block of 64, copying it is slow
_LEAST_NUMBERS = 1 << 24  # of a matrix: smaller ones are left to the library, which knows them better
_LEAST_OF_TREES = 1 << 25
_STEP = 512  # numbers of a matrix's row that are read at a time
_CAPABILITY = (9, 0)  # the hardware copies blocks by itself; others were not tried


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product of rows x [rows, in] with a matrix [out, in] is better made here."""
    least = {_ROW: _LEAST_NUMBERS, _TREE: _LEAST_OF_TREES}.get(len(x))
    return (
        least is not None
        and weight.numel() >= least
        and x.dtype == weight.dtype == torch.bfloat16
        and weight.shape[1] % _STEP == weight.shape[0] % 16 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and runs_fused(x)
        and _recent(x.device)
    )


@functools.cache
def _recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def gates(x: torch.Tensor, weight: torch.Tensor, floor: float, factor: float) -> torch.Tensor:
    """silu(a) * b of the halves a and b of each row's product with [2n, in], scaled first: [rows, in] -> [rows, n].

    Row r is scaled by factor / sqrt(|x[r]|^2 + floor), which is a norm.
    """
    from slipstream import product_kernels

    kernel = product_kernels.row_gates if len(x) == _ROW else product_kernels.gates
    return kernel(x, weight, floor, factor)


def onto_(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Add to total [rows, out] the product of x [rows, in] with [out, in]."""
    from slipstream import product_kernels

    kernel = product_kernels.row_onto_ if len(x) == _ROW else product_kernels.onto_
    kernel(total, x, weight)
