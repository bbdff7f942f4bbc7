# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `paged.py`. Importing this file imports triton: done lazily, and only on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.attention import tiles as facts

# Kernels see constants of other files only in this form.
ROW, COUNT, TABLE = tl.constexpr(facts.ROW), tl.constexpr(facts.COUNT), tl.constexpr(facts.TABLE)
SLOT, COMMITTED = tl.constexpr(facts.SLOT), tl.constexpr(facts.COMMITTED)
STOP, OPEN = tl.constexpr(facts.STOP), tl.constexpr(facts.OPEN)


@triton.jit
def field(fields, which, tiles, tile):
    """One field of a tile; `fields` is [facts, tiles]."""
    return tl.load(fields + which * tiles + tile).to(tl.int32)


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores), tanh by an exponential that may overflow: 2 / inf is 0."""
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))


@triton.jit
def _lines(
    tables,
    table,
    width,
    block,
    columns,
    head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets of the rows of a block's columns in a layer's pages."""
    page = tl.load(tables + table * width + block * BLOCK_N // PAGE).to(tl.int64)
    return (page * KV_HEADS + head) * PAGE * SIZE + (columns % PAGE) * SIZE


@triton.jit
def _marked(bits, live, words, first, BLOCK_N: tl.constexpr):
    """Which of the open columns from `first` on each query sees; `first` may be negative, where nothing is marked.

    `bits` [queries]: where the words of each query's row begin. Each word is read once, not per column: otherwise a
    block with the tree would take several times as long.
    """
    place = (first & 31) + tl.arange(0, BLOCK_N)  # relative to the first word that is read
    seen = tl.zeros([bits.shape[0], BLOCK_N], tl.int32)
    for step in tl.static_range((BLOCK_N + 30) // 32 + 1):
        number = (first >> 5) + step
        word = tl.load(bits + number, mask=live & (number >= 0) & (number < words), other=0)
        seen = tl.where((place >> 5 == step)[None, :], word[:, None] >> (place & 31)[None, :], seen)
    return (seen & 1) != 0


@triton.jit
def _absorbed(scores, v_block, peak, weight, total, PRECISION: tl.constexpr):
    """Peaks, weights and weighted values after one more block of columns."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a row without columns so far
    shares = tl.exp(scores - level[:, None])
    kept = tl.exp(peak - level)
    weight = weight * kept + tl.sum(shares, 1)
    total = total * kept[:, None] + tl.dot(shares.to(v_block.dtype), v_block, input_precision=PRECISION)
    return higher, weight, total


@triton.jit(do_not_specialize=["tiles", "width", "words", "window", "rows", "splits"])
def attend(
    q,  # [rows, q_stride]: the query heads of a row come first
    keys,  # [pages, kv heads, PAGE, SIZE]
    values,
    out,  # [rows, heads, SIZE]; used if there is one split
    parts,  # float32 [splits, rows, heads, SIZE]: weighted values of each split, not yet divided
    stats,  # float32 [2, splits, rows, heads]: peaks and weights of each split
    fields,  # [facts, tiles]
    tables,  # int32 [tables, width]: page numbers
    positions,  # [rows]: absolute positions; read for tiles of trees only
    open_positions,  # absolute positions of the open columns, tree after tree
    bits,  # int32 [rows, words]: which open columns a row sees, 32 to a word
    tiles,
    rows,
    q_stride,
    width,
    words,
    window,  # how far back a query sees, if WINDOWED
    splits,  # programs that share the columns; not a constexpr: every value would compile another kernel
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE rounded up to a power of two
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries of a tile: GROUP for each of its rows, padded
    BLOCK_N: tl.constexpr,  # columns per `tl.dot`; divides PAGE
    TREES: tl.constexpr,  # whether any tile has rows of a tree
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of one sequence's rows, for the query heads of one KV head, over one share of the sequence's columns."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = field(fields, ROW, tiles, tile)
    count = field(fields, COUNT, tiles, tile)
    table = field(fields, TABLE, tiles, tile)
    slot = field(fields, SLOT, tiles, tile)

    queries = tl.arange(0, BLOCK_M)
    mine = queries // GROUP  # the row of a query within the tile
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

    # Rows of a chain are at the slot of their position, and see every column up to their own.
    own = slot + mine
    position = own
    stop = slot + count
    committed = 0
    opened = -1
    if TREES:
        committed = field(fields, COMMITTED, tiles, tile)
        opened = field(fields, OPEN, tiles, tile)
        if opened >= 0:
            stop = field(fields, STOP, tiles, tile)
        position = tl.load(positions + row + mine, mask=live & (opened >= 0), other=0).to(tl.int32)
        position = tl.where(opened >= 0, position, own)

    first = 0
    if WINDOWED:
        lowest = tl.min(tl.where(live, position, 2147483647), 0)
        first = tl.maximum(lowest - window + 1, 0) // BLOCK_N
    share = tl.cdiv(tl.cdiv(stop, BLOCK_N) - first, splits)
    begin = first + split * share
    end = tl.minimum(begin + share, tl.cdiv(stop, BLOCK_N))

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, PADDED], tl.float32)
    # Most blocks are before all of the rows, which see them completely. They skip the masks.
    whole = tl.minimum(end, tl.where(opened >= 0, committed, slot) // BLOCK_N)
    for block in range(begin, whole):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        lines = _lines(tables, table, width, block, columns, head, KV_HEADS, PAGE, SIZE, BLOCK_N)
        k_block = tl.load(keys + lines[None, :] + dims[:, None], mask=inside[:, None], other=0.0)
        v_block = tl.load(values + lines[:, None] + dims[None, :], mask=inside[None, :], other=0.0)
        scores = tl.dot(q_block, k_block, input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores, cap)
        if WINDOWED:
            scores = tl.where(columns[None, :] > position[:, None] - window, scores, float("-inf"))
        peak, weight, total = _absorbed(scores, v_block, peak, weight, total, PRECISION)
    for block in range(tl.maximum(begin, whole), end):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        there = columns < stop
        lines = _lines(tables, table, width, block, columns, head, KV_HEADS, PAGE, SIZE, BLOCK_N)
        k_block = tl.load(
            keys + lines[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0
        )  # [PADDED, BLOCK_N]
        v_block = tl.load(
            values + lines[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )  # [BLOCK_N, PADDED]
        scores = tl.dot(q_block, k_block, input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores, cap)
        seen = columns[None, :] <= own[:, None]
        place = columns
        if TREES:
            open_column = columns - committed  # the index of an open column
            marked = _marked(bits + at * words, live & (opened >= 0), words, block * BLOCK_N - committed, BLOCK_N)
            in_tree = ((open_column < 0)[None, :] | marked) & there[None, :]
            seen = tl.where(opened >= 0, in_tree, seen)
            if WINDOWED:
                among = (opened >= 0) & there & (open_column >= 0)
                placed = tl.load(open_positions + opened + open_column, mask=among, other=0).to(tl.int32)
                place = tl.where(among, placed, columns)
        if WINDOWED:
            seen = seen & (place[None, :] > position[:, None] - window)
        scores = tl.where(seen & live[:, None], scores, float("-inf"))
        peak, weight, total = _absorbed(scores, v_block, peak, weight, total, PRECISION)

    heads = KV_HEADS * GROUP
    line = at * heads + lane
    if splits == 1:
        result = total / tl.where(live, weight, 1.0)[:, None]
        tl.store(
            out + line[:, None] * SIZE + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=live[:, None] & inside[None, :],
        )
    else:
        line += split * rows.to(tl.int64) * heads
        tl.store(stats + line, peak, mask=live)
        tl.store(stats + splits * rows.to(tl.int64) * heads + line, weight, mask=live)
        if begin < end:
            tl.store(parts + line[:, None] * SIZE + dims[None, :], total, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["lines"])
def combine(parts, stats, out, lines, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """One row and head: combine its splits. `lines` is rows * heads; the arrays are those of `attend`."""
    line = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, PADDED)
    inside = dims < SIZE
    at = splits * lines.to(tl.int64) + line
    peaks = tl.load(stats + at)
    weights = tl.load(stats + SPLITS * lines.to(tl.int64) + at)
    seen = weights > 0.0  # a split without columns has not written its part
    factors = tl.where(seen, tl.exp(peaks - tl.max(peaks, 0)), 0.0)
    block = tl.load(parts + at[:, None] * SIZE + dims[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
    result = tl.sum(block * factors[:, None], 0) / tl.sum(weights * factors, 0)
    tl.store(out + line * SIZE + dims, result.to(out.dtype.element_ty), mask=inside)
