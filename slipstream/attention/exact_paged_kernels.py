# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `exact_paged.py`. Importing this file imports triton: only `exact_paged.py` does, on a GPU.

A row's sums run over its own columns in the order of their positions: over blocks inside shares, both cut at fixed
positions, and then over the shares. The work for other rows of a program adds 0 to this row's sums and multiplies them
by 1, which changes no bit. One compiled kernel serves chains and trees, so that the compiler makes no difference
either: what differs from pass to pass is never a `constexpr`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.attention.paged_kernels import COMMITTED, COUNT, OPEN, ROW, SLOT, TABLE, capped, field


@triton.jit(do_not_specialize=["tiles", "words", "deep"])
def lay_out(
    fields,  # int32 [facts, tiles]
    bits,  # int32 [rows, words]: which open columns a row of a tree sees, 32 to a word
    lengths,  # int32 [rows]: how many columns a row sees, which is one more than its position
    ancestors,  # int32 [rows, deep]: the open columns that a row of a tree sees, in the order of their positions
    tiles,
    words,
    deep,
    BLOCK: tl.constexpr,  # number of columns that have bits, rounded up
):
    """One row of one tile. Along a path the columns are in the order of the positions, which are consecutive."""
    tile, line = tl.program_id(0), tl.program_id(1)
    if line < field(fields, COUNT, tiles, tile):
        row = field(fields, ROW, tiles, tile) + line
        length = field(fields, SLOT, tiles, tile) + line + 1
        if field(fields, OPEN, tiles, tile) >= 0:
            columns = tl.arange(0, BLOCK)
            word = tl.load(bits + row * words + (columns >> 5), mask=(columns >> 5) < words, other=0)
            seen = (word >> (columns & 31)) & 1
            tl.store(ancestors + row * deep + tl.cumsum(seen, 0) - 1, columns, mask=seen != 0)
            length = field(fields, COMMITTED, tiles, tile) + tl.sum(seen, 0)
        tl.store(lengths + row, length)


@triton.jit(do_not_specialize=["tiles", "start", "pieces", "rows_each", "width", "deep", "shares", "half", "window"])
def attend(
    q,  # [rows, q_stride]: the query heads of a row come first
    keys,  # [pages, kv heads, PAGE, SIZE]
    values,
    parts,  # float32 [programs, rows_each, heads, shares, SIZE]: weighted values, not yet divided
    stats,  # float32 [2, programs, rows_each, heads, shares]: peaks and weights
    fields,  # int32 [facts, tiles]
    tables,  # int32 [tables, width]: page numbers
    lengths,  # int32 [rows]
    ancestors,  # int32 [rows, deep]; not read for chains
    tiles,
    start,  # index of this launch's first program
    pieces,  # programs per tile
    rows_each,  # rows of a program at most
    q_stride,
    width,
    deep,
    shares,  # of the longest possible sequence
    half,  # elements of one half of `stats`
    window,  # how far back a query sees, if WINDOWED
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE rounded up to a power of two
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries of a program: GROUP for each of its rows, padded
    BLOCK_N: tl.constexpr,  # columns per `tl.dot`; divides PAGE and SHARE
    SHARE: tl.constexpr,  # columns of a share
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A few rows of a tile, for the query heads of one KV head, over every n-th share of their columns."""
    number, head = tl.program_id(0), tl.program_id(1)
    tile, line = (start + number) // pieces, (start + number) % pieces * rows_each
    row = field(fields, ROW, tiles, tile) + line
    count = tl.minimum(field(fields, COUNT, tiles, tile) - line, rows_each)  # 0 or less: no work
    table = field(fields, TABLE, tiles, tile)

    queries = tl.arange(0, BLOCK_M)
    mine = queries // GROUP  # the row of a query within the program
    live = mine < count
    lane = head * GROUP + queries % GROUP
    dims = tl.arange(0, PADDED)
    inside = dims < SIZE
    at = (row + mine).to(tl.int64)
    q_block = tl.load(
        q + at[:, None] * q_stride + lane[:, None] * SIZE + dims[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    length = tl.load(lengths + row + mine, mask=live, other=0)
    longest = tl.max(length, 0)

    # Rows of a chain have every column at the slot of its position. Rows of a tree share the blocks of committed
    # columns; the columns after these each row reads alone: committed ones first, then its ancestors.
    committed = longest
    common = tl.cdiv(longest, BLOCK_N)
    if field(fields, OPEN, tiles, tile) >= 0:
        committed = field(fields, COMMITTED, tiles, tile)
        common = committed // BLOCK_N

    first = 0
    if WINDOWED:
        lowest = tl.min(tl.where(live, length, 2147483647), 0)
        first = tl.maximum(lowest - window, 0) // SHARE
    for share in range(first + tl.program_id(2), tl.cdiv(longest, SHARE), tl.num_programs(2)):
        begin = share * (SHARE // BLOCK_N)
        blocks = tl.minimum(SHARE // BLOCK_N, tl.cdiv(longest, BLOCK_N) - begin)
        alike = tl.minimum(tl.maximum(common - begin, 0), blocks)
        apart = blocks - alike
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M, PADDED], tl.float32)
        for step in range(alike + apart * count):
            own = step >= alike
            mate = tl.maximum(step - alike, 0) // tl.maximum(apart, 1)  # this block's row, if it is not shared
            block = begin + step - mate * apart
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            there = columns < tl.where(own, tl.load(lengths + row + mate), longest)
            opened = there & own & (columns >= committed)
            ancestor = tl.load(ancestors + (row + mate) * deep + columns - committed, mask=opened, other=0)
            slots = tl.where(opened, committed + ancestor, columns)
            seen = (columns[None, :] < length[:, None]) & ((mine == mate) | (step < alike))[:, None]
            if WINDOWED:
                seen = seen & (columns[None, :] >= (length - window)[:, None])
            page = tl.load(tables + table * width + slots // PAGE, mask=there, other=0).to(tl.int64)
            lines = ((page * KV_HEADS + head) * PAGE + slots % PAGE) * SIZE
            k_block = tl.load(
                keys + lines[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0
            )  # [PADDED, BLOCK_N]
            scores = tl.dot(q_block, k_block, input_precision=PRECISION)
            if CAPPED:
                scores = capped(scores, cap)
            scores = tl.where(seen & live[:, None], scores, float("-inf"))

            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # a row without columns so far
            weights = tl.exp(scores - level[:, None])
            kept = tl.exp(peak - level)
            v_block = tl.load(
                values + lines[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )  # [BLOCK_N, PADDED]
            weight = weight * kept + tl.sum(weights, 1)
            total = total * kept[:, None] + tl.dot(weights.to(v_block.dtype), v_block, input_precision=PRECISION)
            peak = higher

        place = ((number.to(tl.int64) * rows_each + mine) * KV_HEADS * GROUP + lane) * shares + share
        tl.store(stats + place, peak, mask=live)
        tl.store(stats + half + place, weight, mask=live)
        tl.store(parts + place[:, None] * SIZE + dims[None, :], total, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tiles", "start", "pieces", "rows_each", "shares", "half", "window"])
def combine(
    parts,
    stats,
    out,  # [rows, heads, SIZE]
    fields,
    lengths,
    tiles,
    start,
    pieces,
    rows_each,
    shares,
    half,
    window,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SHARE: tl.constexpr,
    AT_ONCE: tl.constexpr,  # shares that are read together
    WINDOWED: tl.constexpr,
):
    """One row and head: combine its shares, AT_ONCE at a time, also cut at fixed positions. As for `attend`."""
    number, head = tl.program_id(0), tl.program_id(1)
    program = start + number // rows_each
    tile, line = program // pieces, program % pieces * rows_each + number % rows_each
    live = line < field(fields, COUNT, tiles, tile)
    row = (field(fields, ROW, tiles, tile) + line).to(tl.int64)
    length = tl.load(lengths + row, mask=live, other=0)
    dims = tl.arange(0, PADDED)
    inside = dims < SIZE

    begin = 0
    if WINDOWED:
        begin = tl.maximum(length - window, 0) // SHARE
    end = tl.cdiv(length, SHARE)
    peak = tl.full([], float("-inf"), tl.float32)
    weight = tl.zeros([], tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    for group in range(begin // AT_ONCE, tl.cdiv(end, AT_ONCE)):
        share = group * AT_ONCE + tl.arange(0, AT_ONCE)
        there = (share >= begin) & (share < end)
        place = (number.to(tl.int64) * HEADS + head) * shares + share
        peaks = tl.load(stats + place, mask=there, other=float("-inf"))
        weights = tl.load(stats + half + place, mask=there, other=0.0)
        block = tl.load(parts + place[:, None] * SIZE + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        kept = tl.exp(peak - higher)
        factors = tl.exp(peaks - higher)
        weight = weight * kept + tl.sum(weights * factors, 0)
        total = total * kept + tl.sum(block * factors[:, None], 0)
        peak = higher
    result = total / tl.where(live, weight, 1.0)
    tl.store(out + (row * HEADS + head) * SIZE + dims, result.to(out.dtype.element_ty), mask=inside & live)
