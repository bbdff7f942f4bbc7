# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `gemm.py`. Importing this file imports triton: only `gemm.py` does, and only on a GPU.

Reading the weights takes nearly all of the time. A program reads its part of a matrix once for all rows; for the rows
of a tree it copies large blocks by TMA. The epilogue costs almost nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 64  # rows of a tensor core tile, used or not
_PROGRAMS = 128  # about as many as a large GPU runs at once
_MOST_SPLITS = 4


class Tile(NamedTuple):
    """The tile of one program."""

    columns: int  # of the output
    inner: int  # elements of the inner dimension per step
    stages: int  # steps in flight


# Tuned on an H200, with the matrices of an 8B model.
_GATES, _ONTO = Tile(64, 128, 4), Tile(64, 128, 5)
ROW_COLUMNS, ROW_INNER, _ROW_STAGES = Tile(8, 512, 4)  # for one row


@triton.jit(do_not_specialize=["rows", "floor", "factor"])
def _gates(
    x,  # descriptor of [rows, inner]
    w,  # descriptor of [2 * width, inner]: gates, then values
    out,  # [rows, width]
    rows,
    width,
    inner,
    floor,
    factor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some columns of all rows. Missing rows are zeros."""
    first = tl.program_id(0) * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, inner, BLOCK_K):
        piece = x.load([0, start])
        gate = tl.dot(piece, w.load([first, start]).T, gate)
        value = tl.dot(piece, w.load([width + first, start]).T, value)
        numbers = piece.to(tl.float32)
        squares += numbers * numbers
    scale = (factor / tl.sqrt(tl.sum(squares, 1) + floor))[:, None]
    gate *= scale
    result = gate * tl.sigmoid(gate) * value * scale
    row, column = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def gates(x: torch.Tensor, weight: torch.Tensor, floor: float, factor: float) -> torch.Tensor:
    """`gemm.gates` for the rows of a tree."""
    rows, inner = x.shape
    width = len(weight) // 2
    out = x.new_empty(rows, width)
    tile = _GATES
    _gates[(triton.cdiv(width, tile.columns),)](
        TensorDescriptor.from_tensor(x, [ROWS, tile.inner]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]),
        *(out, rows, width, inner, floor, factor),
        BLOCK_M=ROWS,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _onto(
    x,  # descriptor of [rows, inner]
    w,  # descriptor of [width, inner]
    total,  # [rows, width]
    parts,  # float32 [SPLITS - 1, tiles, BLOCK_M, BLOCK_N]
    flags,  # int32 [SPLITS - 1, tiles]: 0 before and afterwards
    rows,
    width,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Some columns of all rows, over a share of the inner dimension. The program of the last share sums all of them.

    It waits for programs with lower numbers. Nothing guarantees that these start earlier, but GPUs do so. Shares are
    summed in a fixed order.
    """
    tile, split, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    first = tile * BLOCK_N
    share = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLITS) * BLOCK_K
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(split * share, tl.minimum(inner, (split + 1) * share), BLOCK_K):
        sums = tl.dot(x.load([0, start]), w.load([first, start]).T, sums)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    cells = row[:, None] * BLOCK_N + column[None, :]
    if split < SPLITS - 1:
        here = split * tiles + tile
        tl.store(parts + here * BLOCK_M * BLOCK_N + cells, sums)
        tl.debug_barrier()
        tl.atomic_xchg(flags + here, 1, sem="release")
    else:
        for other in tl.static_range(SPLITS - 1):
            there = other * tiles + tile
            while tl.atomic_cas(flags + there, 1, 0, sem="acquire") == 0:
                pass
            tl.debug_barrier()
            sums += tl.load(parts + there * BLOCK_M * BLOCK_N + cells, cache_modifier=".cg")
        inside = (row < rows)[:, None] & (first + column < width)[None, :]
        at = total + row[:, None] * width + first + column[None, :]
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, sums.to(total.dtype.element_ty), mask=inside)


def onto_(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """`gemm.onto_` for the rows of a tree."""
    (rows, inner), width, tile = x.shape, len(weight), _ONTO
    tiles = triton.cdiv(width, tile.columns)
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // tiles))
    parts, flags = _space(x.device)
    _onto[tiles, splits](
        TensorDescriptor.from_tensor(x, [ROWS, tile.inner]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]),
        *(total, parts, flags, rows, width, inner),
        BLOCK_M=ROWS,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.inner,
        SPLITS=splits,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["floor", "factor"])
def _row_gates(
    x,  # [inner]
    w,  # [2 * width, inner]: gates, then values
    out,  # [width]
    width,
    inner,
    floor,
    factor,
    BLOCK_N: tl.constexpr,  # divides width
    BLOCK_K: tl.constexpr,  # divides inner
    STAGES: tl.constexpr,
):
    """`_gates` for one row: every weight is used once, which needs no tensor cores."""
    column, part = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gate_at = w + column[:, None].to(tl.int64) * inner + part[None, :]
    value_at = gate_at + width.to(tl.int64) * inner
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    values = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        piece = tl.load(x + start + part).to(tl.float32)
        gates += tl.load(gate_at + start, eviction_policy="evict_first").to(tl.float32) * piece[None, :]
        values += tl.load(value_at + start, eviction_policy="evict_first").to(tl.float32) * piece[None, :]
        squares += piece * piece
    scale = factor / tl.sqrt(tl.sum(squares, 0) + floor)
    gate = tl.sum(gates, 1) * scale
    result = gate * tl.sigmoid(gate) * tl.sum(values, 1) * scale
    tl.store(out + column, result.to(out.dtype.element_ty))


def row_gates(x: torch.Tensor, weight: torch.Tensor, floor: float, factor: float) -> torch.Tensor:
    """`gemm.gates` for one row."""
    inner, width = x.shape[1], len(weight) // 2
    out = x.new_empty(1, width)
    _row_gates[(width // ROW_COLUMNS,)](
        *(x, weight, out, width, inner, floor, factor),
        BLOCK_N=ROW_COLUMNS,
        BLOCK_K=ROW_INNER,
        STAGES=_ROW_STAGES,
    )
    return out


@triton.jit
def _row_onto(x, w, total, inner, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """`_onto` for one row; x [inner], w [width, inner], total [width]."""
    column, part = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at = w + column[:, None].to(tl.int64) * inner + part[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        piece = tl.load(x + start + part).to(tl.float32)
        sums += tl.load(at + start, eviction_policy="evict_first").to(tl.float32) * piece[None, :]
    result = tl.sum(sums, 1) + tl.load(total + column).to(tl.float32)
    tl.store(total + column, result.to(total.dtype.element_ty))


def row_onto_(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """`gemm.onto_` for one row."""
    width, inner = weight.shape
    _row_onto[(width // ROW_COLUMNS,)](
        *(x, weight, total, inner), BLOCK_N=ROW_COLUMNS, BLOCK_K=ROW_INNER, STAGES=_ROW_STAGES
    )


@functools.cache
def _space(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Workspace for the shares of a split GEMM, and their flags. GEMMs on a stream run in order and share it."""
    assert not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing(), "run once before recording"
    parts = torch.empty(_PROGRAMS * ROWS * _ONTO.columns, dtype=torch.float32, device=device)
    return parts, torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
