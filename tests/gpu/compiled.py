"""Compiles the kernels of sampling for a GPU, which need not be there: `python -m tests.gpu.compiled`.

Triton's interpreter accepts what its compiler does not; this finds out without a GPU. Prints one line per kernel.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.gpu import cut_kernels, sampling_kernels

ROWS = {"logits": "*bf16", "keys": "*i64", "temperatures": "*fp32"}
SIZES = {"rows": "i32", "vocab": "i32", "stride": "i32", "blocks": "i32"}
CUTS = {"min_ps": "*fp32", "top_ks": "*i64", "top_ps": "*fp64", "peaks": "*fp32"}

# Kernel -> its arguments' types, its constants, and its warps, as it is called for 128,256 tokens.
KERNELS: list[tuple[Any, dict[str, str], dict[str, object], int]] = [
    (
        sampling_kernels._tops,
        {**ROWS, "tops": "*fp32", "peaks": "*fp32", **SIZES},
        {"PEAKS": True, "BLOCK": 2048},
        8,
    ),
    (
        sampling_kernels._decide,
        {**ROWS, "tops": "*fp32", "chosen": "*i64", **SIZES},
        {"BLOCK": 2048, "BLOCKS": 64},
        4,
    ),
    (
        cut_kernels._cut,
        {**ROWS, **CUTS, "chosen": "*i64", **SIZES},
        {"PEAKS": 64, "BLOCK": 4096, "BLOCKS": 32},
        16,
    ),
]


def main() -> None:
    """Compile all of them for Hopper, Ada and Ampere."""
    for kernel, types, constants, warps in KERNELS:
        for capability in (90, 89, 80):
            source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
            print(kernel.__name__, capability, len(made.asm["cubin"]), made.metadata.shared)


if __name__ == "__main__":
    main()
