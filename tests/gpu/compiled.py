"""Compiles the kernels of sampling for a GPU, which need not be there: `python -m tests.gpu.compiled`.

Triton's interpreter accepts what its compiler does not; this finds out without a GPU. Prints one line per kernel.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.gpu.kernels import adjust_kernels, cut_kernels, sampling_kernels, score_kernels

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
    (
        adjust_kernels._adjust,
        {
            "logits": "*bf16",
            "scores": "*fp32",
            "flags": "*i32",
            "penalties": "*fp32",
            "bias": "*fp32",
            "counts": "*i32",
            "tokens": "*i64",
            "parents": "*i64",
            **dict.fromkeys(("lanes", "each", "vocab", "stride"), "i32"),
        },
        {"DEPTH": 16, "BLOCK": 2048},
        8,
    ),
    (
        adjust_kernels._forbid,
        {
            "scores": "*fp32",
            **dict.fromkeys(("tail", "last", "before", "until", "tokens", "parents", "after"), "*i64"),
            **dict.fromkeys(("each", "vocab"), "i32"),
        },
        {"BEFORE": 7, "ENTRIES": 64},
        1,
    ),
    (
        score_kernels._score,
        {
            "logits": "*bf16",
            **dict.fromkeys(("rows", "tokens", "wanted"), "*i64"),
            "values": "*fp32",
            "ids_out": "*i64",
            "vocab": "i32",
            "stride": "i32",
        },
        {"WIDTH": 21, "BLOCK": 4096, "BLOCKS": 32},
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
