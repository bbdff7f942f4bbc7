# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `exact_linear.py`: batch-invariant GEMMs.

Importing this file imports triton: only `exact_linear.py` does, and only on a GPU. Tiles and split-K shares depend on
the shape of the matrix alone, and both are summed in a fixed order. Rows that pad a tile are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_PROGRAMS = 256  # two per multiprocessor of a large GPU
_LEAST_STEPS = 4  # inner steps of a share
_ROWS = 1024  # rows at a time: shares are kept until they are summed
_NUMBERS = 1024  # outputs of one program that sums shares


class Cut(NamedTuple):
    """Tile sizes of a GEMM: the same for any number of rows."""

    rows: int
    columns: int
    depth: int
    stages: int


# Weights are read once for this many rows: those of a large tree, which tensor cores compute at no extra cost.
_HALF = Cut(rows=64, columns=128, depth=64, stages=4)
_FULL = Cut(rows=16, columns=64, depth=32, stages=3)


@triton.jit
def _keep(result, out, bias, total, at, columns, stride, inside, BIASED: tl.constexpr, ONTO: tl.constexpr):
    """Store sums plus bias and `total`; `stride` is the number of outputs."""
    if BIASED:
        result += tl.load(bias + columns, mask=columns < stride, other=0.0).to(tl.float32)
    if ONTO:
        result += tl.load(total + at * stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at * stride + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,  # [rows, width]
    weight,  # [outputs, width]
    bias,  # [outputs]
    total,  # [rows, outputs]
    out,  # [rows, outputs], or of shares float32 [SHARES, rows, outputs]
    rows,
    outputs,
    width,
    x_stride,
    SHARES: tl.constexpr,
    STEPS: tl.constexpr,  # inner steps of each share
    BIASED: tl.constexpr,
    ONTO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one share."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    depth = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(share * STEPS, (share + 1) * STEPS):
        inner = step * BLOCK_K + depth
        there = inner < width
        x_block = tl.load(
            x + at[:, None] * x_stride + inner[None, :], mask=(at < rows)[:, None] & there[None, :], other=0.0
        )
        w_block = tl.load(
            weight + columns[None, :] * width + inner[:, None],
            mask=(columns < outputs)[None, :] & there[:, None],
            other=0.0,
        )  # [BLOCK_K, BLOCK_N]
        sums = tl.dot(x_block, w_block, sums, input_precision=PRECISION)
    inside = (at < rows)[:, None] & (columns < outputs)[None, :]
    if SHARES > 1:
        place = share.to(tl.int64) * rows * outputs + at[:, None] * outputs + columns[None, :]
        tl.store(out + place, sums, mask=inside)
    else:
        _keep(sums, out, bias, total, at[:, None], columns[None, :], outputs, inside, BIASED, ONTO)


@triton.jit(do_not_specialize=["rows"])
def _add_up(
    parts,  # float32 [SHARES, rows, outputs]
    bias,
    total,
    out,
    rows,
    outputs,
    SHARES: tl.constexpr,
    BIASED: tl.constexpr,
    ONTO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the shares of a part of one row, in order."""
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < outputs
    sums = tl.zeros([BLOCK], tl.float32)
    for share in tl.static_range(SHARES):
        place = (share * rows.to(tl.int64) + at) * outputs + columns
        sums += tl.load(parts + place, mask=inside, other=0.0)
    _keep(sums, out, bias, total, at, columns, outputs, inside, BIASED, ONTO)


def cut_of(dtype: torch.dtype) -> Cut:
    """Tile sizes for this dtype."""
    return _FULL if dtype == torch.float32 else _HALF


def shares_of(outputs: int, width: int, cut: Cut) -> int:
    """The number of split-K shares: more if there are few outputs to keep a GPU busy."""
    tiles, steps = triton.cdiv(outputs, cut.columns), triton.cdiv(width, cut.depth)
    return int(max(1, min(_PROGRAMS // tiles, steps // _LEAST_STEPS)))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out = x weight^T + bias + total, rounded once; x [rows, width], weight [outputs, width], all one type.

    `total` and `out`, [rows, outputs] and contiguous, may be the same.
    """
    cut = cut_of(x.dtype)
    outputs, width = weight.shape
    shares = shares_of(outputs, width, cut)
    for start in range(0, len(x), _ROWS):
        some = slice(start, start + _ROWS)
        _some_rows(x[some], weight, bias, None if total is None else total[some], out[some], cut, shares)


def _some_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor,
    cut: Cut,
    shares: int,
) -> None:
    rows, (outputs, width) = len(x), weight.shape
    parts = out if shares == 1 else x.new_empty((shares, rows, outputs), dtype=torch.float32)
    added = out if bias is None else bias, out if total is None else total
    kinds = {"SHARES": shares, "BIASED": bias is not None, "ONTO": total is not None}
    _product[triton.cdiv(rows, cut.rows), triton.cdiv(outputs, cut.columns), shares](
        *(x, weight, *added, parts, rows, outputs, width, x.stride(0)),
        **kinds,
        STEPS=triton.cdiv(triton.cdiv(width, cut.depth), shares),
        BLOCK_M=cut.rows,
        BLOCK_N=cut.columns,
        BLOCK_K=cut.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=cut.stages,
    )
    if shares > 1:
        _add_up[rows, triton.cdiv(outputs, _NUMBERS)](*(parts, *added, out, rows, outputs), **kinds, BLOCK=_NUMBERS)
