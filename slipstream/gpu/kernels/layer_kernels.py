# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `layer_ops.py`. Importing this file imports triton: only `layer_ops.py` does, on a GPU.

One program per row, so that no row depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_PAIRS, _COLUMNS = 512, 1024  # pairs and columns of one program
_MANY_ROWS = 128  # from this many rows on, half the programs for each: every program computes the row's norm again


@triton.jit
def _scale(x, row, stride, width, floor, factor, BLOCK: tl.constexpr):
    """The factor by which the norm scales a row of x."""
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    return factor / tl.sqrt(tl.sum(values * values, 0) + floor)


@triton.jit(do_not_specialize=["floor", "factor"])
def _rotate_and_store(
    qkv,  # [rows, 2 * pairs]: q, k and v
    turns,  # float32 [positions, SIZE / 2, 2]: cosines and sines
    positions,  # int64 [rows]
    both,  # [2, pages, KV_HEADS, PAGE, SIZE]
    pages,  # int64 [rows]
    offsets,  # int64 [rows]
    bias,  # [2 * pairs]: added after the norm, if present
    x,  # [rows, width]: the input of the GEMM, if its norm is deferred
    stride,
    x_stride,
    width,
    layer_pages,
    pairs,
    floor,
    factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BIASED: tl.constexpr,
    DEFERRED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    half: tl.constexpr = SIZE // 2
    # Loads that other addresses depend on come first.
    position, page, offset = tl.load(positions + row), tl.load(pages + row), tl.load(offsets + row)
    first = tl.load(qkv + row * stride + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + row * stride + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    if DEFERRED:
        scale = _scale(x, row, x_stride, width, floor, factor, WIDTH)
        first = first * scale
        second = second * scale
    if BIASED:
        first += tl.load(bias + 2 * pair, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    rotated = pair < (HEADS + KV_HEADS) * half
    turn = turns + (position * half + pair % half) * 2
    real = tl.load(turn, mask=inside & rotated, other=1.0)
    imaginary = tl.load(turn + 1, mask=inside & rotated, other=0.0)
    kind = qkv.dtype.element_ty
    left = (first * real - second * imaginary).to(kind)
    right = (first * imaginary + second * real).to(kind)
    query = inside & (pair < HEADS * half)
    tl.store(qkv + row * stride + 2 * pair, left, mask=query)
    tl.store(qkv + row * stride + 2 * pair + 1, right, mask=query)
    after_q = pair - HEADS * half
    part = after_q // (KV_HEADS * half)  # k, then v
    head = after_q // half % KV_HEADS
    line = ((part * layer_pages + page) * KV_HEADS + head) * PAGE + offset
    kept = inside & (after_q >= 0)
    tl.store(both + line * SIZE + 2 * (pair % half), left, mask=kept)
    tl.store(both + line * SIZE + 2 * (pair % half) + 1, right, mask=kept)


def rotate_and_store(
    qkv: torch.Tensor,
    placed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    both: torch.Tensor,
    heads: int,
    deferred: tuple[torch.Tensor, float, float] | None,
    bias: torch.Tensor | None,
) -> None:
    """Rotate q [rows, ...] in place; write k, rotated, and v to the layer `both` [2, pages, kv heads, PAGE, size].

    `placed`: the fields of a `RowPlacement`.
    """
    table, positions, pages, offsets = placed
    rows, pairs = qkv.shape[0], qkv.shape[1] // 2
    _, layer_pages, kv_heads, page, size = both.shape
    x, floor, factor = (qkv, 0.0, 1.0) if deferred is None else deferred
    block = _PAIRS if rows < _MANY_ROWS else 2 * _PAIRS
    if rows:
        _rotate_and_store[rows, triton.cdiv(pairs, block)](
            *(qkv, torch.view_as_real(table), positions, both, pages, offsets, qkv if bias is None else bias, x),
            *(qkv.stride(0), x.stride(0), x.shape[1], layer_pages, pairs, floor, factor),
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            PAGE=page,
            BIASED=bias is not None,
            DEFERRED=deferred is not None,
            WIDTH=triton.next_power_of_2(x.shape[1]),
            BLOCK=block,
        )


@triton.jit(do_not_specialize=["floor", "factor"])
def _gate(both, x, out, width, x_stride, x_width, floor, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    scale = _scale(x, row, x_stride, x_width, floor, factor, WIDTH)
    gate = tl.load(both + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(both + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def deferred_gate(both: torch.Tensor, deferred: tuple[torch.Tensor, float, float]) -> torch.Tensor:
    """silu of the first half of each row times the second half, both scaled first: [rows, 2n] -> [rows, n]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    x, floor, factor = deferred
    block = _COLUMNS if rows < _MANY_ROWS else 2 * _COLUMNS
    if rows:
        _gate[rows, triton.cdiv(width, block)](
            *(both, x, out, width, x.stride(0), x.shape[1], floor, factor),
            WIDTH=triton.next_power_of_2(x.shape[1]),
            BLOCK=block,
        )
    return out


@triton.jit(do_not_specialize=["eps"])
def _normed(first, second, first_weight, second_weight, out, width, stride, eps, BLOCK: tl.constexpr):
    """One row of one of two kinds; the second comes after the first in `out`, whose rows are `stride` apart."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x, weight = first, first_weight
    if part == 1:
        x, weight = second, second_weight
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    out += row * stride + part * width
    tl.store(out + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


def normed(parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
    """One or two kinds of rows [rows, width], each with a norm of its own, side by side: [rows, kinds * width]."""
    rows, width = parts[0].shape
    out = parts[0].new_empty(rows, len(parts) * width)
    if rows:
        first, second = parts[0].contiguous(), parts[-1].contiguous()
        _normed[rows, len(parts)](
            *(first, second, weights[0], weights[-1], out, width, out.stride(0), eps),
            BLOCK=triton.next_power_of_2(width),
        )
    return out
