"""Products of large matrices with one row, or with the rows of a large tree, and what follows: on Hopper GPUs.

The library's products leave a tenth of the time on the table there, and the gates behind them are one more kernel. All
products of this kind on a device are expected on one stream: the shares of those that are split use one place in turn.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from slipstream.fused import runs_fused

_ROW, _TREE = 1, 64  # rows: no others. Where rows are missing in a block of 64, copying it is slow
_LEAST_NUMBERS = 1 << 24  # of a matrix: smaller ones are left to the library, which knows them better
_LEAST_OF_TREES = 1 << 25
_INNER, _OUTER = 512, 16  # of which the sides of a matrix are multiples: what one program takes, gates and values
_CAPABILITY = (9, 0)  # Hopper: the hardware copies blocks by itself, and has room for them. Others were not tried


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product of rows x [rows, in] with a matrix [out, in] is better made here."""
    least = {_ROW: _LEAST_NUMBERS, _TREE: _LEAST_OF_TREES}.get(len(x))
    return (
        least is not None
        and weight.numel() >= least
        and x.dtype == weight.dtype == torch.bfloat16
        and weight.shape[1] % _INNER == weight.shape[0] % _OUTER == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and runs_fused(x)
        and _tried(x.device)
    )


@functools.cache
def _tried(device: torch.device) -> bool:
    """Whether the kernels were made for such a GPU, and this version of triton has what they need."""
    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(device) == _CAPABILITY
        and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    )


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
