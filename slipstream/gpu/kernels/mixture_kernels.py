# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `models/gpu_mixture.py`. Importing this file imports triton: done lazily, and only on a GPU.

A pair is a row and one of its experts: pair `row * per_token + rank`, ranks in ascending order of the experts. All
shapes follow from the number of rows alone, so there is no host synchronisation. A sum has one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_COUNTED = 1024  # pairs that are grouped at a time
_ADDED = 1024  # columns of one program


class _Tile(NamedTuple):
    """The tile of one program. A row's sum runs over the width from front to back in every shape."""

    pairs: int
    columns: int
    depth: int  # bytes of the width per step
    stages: int
    warps: int


_FEW = _Tile(pairs=32, columns=64, depth=256, stages=4, warps=4)  # memory-bound: the weights are read once
_MANY = _Tile(pairs=128, columns=128, depth=128, stages=3, warps=8)  # prompts: the same weights serve many pairs


class Groups(NamedTuple):
    """The pairs of each expert."""

    order: torch.Tensor  # int32 [experts, pairs]: an expert's pairs, ascending; the rest is undefined
    counts: torch.Tensor  # int32 [experts]: how many of them there are


@triton.jit
def _choose(
    logits,  # [rows, EXPERTS]
    chosen,  # int32 [rows, PER_TOKEN]
    shares,  # float32 [rows, PER_TOKEN]
    stride,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < EXPERTS
    scores = tl.load(logits + row * stride + experts, mask=inside, other=float("-inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    # NaN stays in the shares, but must not select a missing expert, or one expert twice.
    left = tl.where(inside, tl.where(weights == weights, weights, 0.0), -1.0)
    selected = experts < 0
    total = 0.0
    for _ in tl.static_range(PER_TOKEN):
        best = experts == tl.argmax(left, 0)
        total += tl.sum(tl.where(best, weights, 0.0), 0)
        left = tl.where(best, -2.0, left)
        selected = selected | best
    if NORMED:
        weights = weights / total
    rank = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(chosen + row * PER_TOKEN + rank, experts, mask=selected)
    tl.store(shares + row * PER_TOKEN + rank, weights, mask=selected)


def choose(logits: torch.Tensor, per_token: int, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts of each row of [rows, experts], int32 [rows, per_token], ascending, and their float32 shares.

    Shares are those of a softmax over all experts, or, if `normed`, over the chosen ones.
    """
    rows, experts = logits.shape
    chosen = torch.empty(rows, per_token, dtype=torch.int32, device=logits.device)
    shares = torch.empty(rows, per_token, dtype=torch.float32, device=logits.device)
    if rows:
        _choose[(rows,)](
            *(logits, chosen, shares, logits.stride(0)),
            EXPERTS=experts,
            PER_TOKEN=per_token,
            NORMED=normed,
            BLOCK=triton.next_power_of_2(experts),
        )
    return chosen, shares


@triton.jit(do_not_specialize=["pairs"])
def _group(chosen, order, counts, pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    start = 0
    count = 0
    while start < pairs:
        pair = start + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(mine, 0) - 1
        tl.store(order + expert.to(tl.int64) * pairs + place, pair, mask=mine > 0)
        count += tl.sum(mine, 0)
        start += BLOCK
    tl.store(counts + expert, count)


def group(chosen: torch.Tensor, experts: int) -> Groups:
    """The pairs of each expert, from the experts of each pair, int32 [rows, per_token]."""
    pairs = chosen.numel()
    order = torch.empty(experts, pairs, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _group[(experts,)](chosen, order, counts, pairs, BLOCK=_COUNTED)
    return Groups(order, counts)


@triton.jit(do_not_specialize=["pairs"])
def _product(
    x,  # [pairs / SHARED, WIDTH]
    weights,  # [EXPERTS, columns, WIDTH]
    order,  # int32 [EXPERTS, pairs]
    counts,  # int32 [EXPERTS]
    out,  # [pairs, columns]
    pairs,
    columns,
    stride,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,  # pairs that share one row of x
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # EXPERTS rounded up to a power of two
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Blocks of PAIRS pairs, expert after expert. There is a program for every possible block.
    block = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    blocks = (tl.load(counts + experts, mask=experts < EXPERTS, other=0) + PAIRS - 1) // PAIRS
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)  # how many experts end before this block
    if expert >= EXPERTS:
        return
    first = tl.sum(tl.where(experts < expert, blocks, 0), 0)
    place = (block - first) * PAIRS + tl.arange(0, PAIRS)
    real = place < tl.load(counts + expert)
    expert = expert.to(tl.int64)
    pair = tl.load(order + expert * pairs + place, mask=real, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    lines = weights + (expert * columns + column.to(tl.int64)) * WIDTH
    rows = x + pair // SHARED * stride
    # Weights are the left operand, where tensor core tiles are 64 rows: pairs may be few.
    sums = tl.zeros([COLUMNS, PAIRS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        within = depth < WIDTH
        weight = tl.load(lines[:, None] + depth[None, :], mask=inside[:, None] & within[None, :], other=0.0)
        given = tl.load(rows[:, None] + depth[None, :], mask=real[:, None] & within[None, :], other=0.0)
        sums = tl.dot(weight, tl.trans(given), sums, input_precision="ieee")
    places = out + pair[:, None] * columns + column[None, :]
    tl.store(places, tl.trans(sums).to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def product(x: torch.Tensor, weights: torch.Tensor, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """Each pair's row times its expert's matrix: [pairs, columns] in `dtype`.

    x [pairs, width], or [rows, width] for all pairs of a row; weights [experts, columns, width], contiguous, of which
    only those of experts that have pairs are read.
    """
    experts, columns, width = weights.shape
    pairs = groups.order.shape[1]
    out = torch.empty(pairs, columns, dtype=dtype, device=x.device)
    tile = _FEW if pairs <= _FEW.pairs * experts else _MANY
    # An expert's last block may be partial. Blocks of one matrix run side by side, so that it is read from memory once.
    blocks = pairs // tile.pairs + min(pairs, experts)
    if pairs:
        _product[blocks, triton.cdiv(columns, tile.columns)](
            *(x, weights, *groups, out, pairs, columns, x.stride(0)),
            WIDTH=width,
            SHARED=pairs // len(x),
            EXPERTS=experts,
            PADDED=triton.next_power_of_2(experts),
            PAIRS=tile.pairs,
            COLUMNS=tile.columns,
            DEPTH=tile.depth // weights.element_size(),
            num_stages=tile.stages,
            num_warps=tile.warps,
        )
    return out


@triton.jit
def _add(total, parts, shares, width, stride, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    added = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + rank
        added += tl.load(shares + pair) * tl.load(parts + pair * width + columns, mask=inside, other=0.0)
    before = tl.load(total + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * stride + columns, (before + added).to(total.dtype.element_ty), mask=inside)


def add_(total: torch.Tensor, parts: torch.Tensor, shares: torch.Tensor) -> None:
    """Add to each row of `total` [rows, width] its pairs' float32 parts [pairs, width], by their shares [rows, n]."""
    rows, width = total.shape
    if rows:
        grid = (rows, triton.cdiv(width, _ADDED))
        _add[grid](total, parts, shares, width, total.stride(0), PER_TOKEN=shares.shape[1], BLOCK=_ADDED)
