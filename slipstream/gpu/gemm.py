"""GEMMs of large matrices with one row, or with the 64 rows of a large tree, with fused epilogues: on Hopper GPUs.

The library's GEMMs leave a tenth of the time unused there, and the gates after them are one more kernel. All these
GEMMs on a device must run on one stream: split GEMMs share one workspace.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from slipstream.gpu.fused import runs_fused

_ROW, _TREE = 1, 64  # numbers of rows that are supported. A partial block of 64 rows copies slowly
_LEAST_NUMBERS = 1 << 24  # elements of a matrix: smaller ones are faster in the library
_LEAST_OF_TREES = 1 << 25
_INNER, _OUTER = 512, 16  # the sides of a matrix must be multiples of these: the tile of one program
_CAPABILITY = (9, 0)  # Hopper: TMA copies, and enough shared memory for them. Others were not tried


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the GEMM of x [rows, in] with a matrix [out, in] is faster by these kernels."""
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
    """Whether the kernels were tuned for this GPU, and this version of triton supports them."""
    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(device) == _CAPABILITY
        and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    )


def gates(x: torch.Tensor, weight: torch.Tensor, floor: float, factor: float) -> torch.Tensor:
    """silu(a) * b of the halves a and b of each row's product with [2n, in], scaled first: [rows, in] -> [rows, n].

    Row r is scaled by factor / sqrt(|x[r]|^2 + floor), which is a norm.
    """
    from slipstream.gpu.kernels import gemm_kernels

    kernel = gemm_kernels.row_gates if len(x) == _ROW else gemm_kernels.gates
    return kernel(x, weight, floor, factor)


def onto_(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Add to total [rows, out] the product of x [rows, in] with [out, in]."""
    from slipstream.gpu.kernels import gemm_kernels

    kernel = gemm_kernels.row_onto_ if len(x) == _ROW else gemm_kernels.onto_
    kernel(total, x, weight)
