# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `lanes.py`. Importing this file imports triton: done lazily, and only on a GPU.

Each replaces a dozen plain operations on a few numbers, every one of which costs a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS = 128  # rows of one program, and columns of one program
_COLUMNS = 1024


@triton.jit(do_not_specialize=["rows", "each", "width", "highest"])
def _place_rows(
    first,  # int64 [lanes]
    tables,  # int32 [lanes, width]
    lines,  # int64 [rows]: the lanes of the rows, if GIVEN; else each lane has `each` rows
    offsets,  # int64 [rows], or [each] shared by all lanes
    depths,  # the same
    positions,  # int64 [rows], as those below
    pages,
    places,
    rows,
    each,
    width,
    highest,
    PAGE: tl.constexpr,
    GIVEN: tl.constexpr,
    OWN_OFFSETS: tl.constexpr,
    OWN_DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    lane = row // each
    if GIVEN:
        lane = tl.load(lines + row, mask=inside, other=0)
    start = tl.load(first + lane, mask=inside, other=0)
    slot = start + tl.load(offsets + (row if OWN_OFFSETS else row % each), mask=inside, other=0)
    position = start + tl.load(depths + (row if OWN_DEPTHS else row % each), mask=inside, other=0)
    known = tl.maximum(slot, 0)
    page = tl.load(tables + lane.to(tl.int64) * width + known // PAGE, mask=inside, other=0)
    tl.store(positions + row, tl.minimum(tl.maximum(position, 0), highest), mask=inside)
    tl.store(pages + row, page.to(tl.int64), mask=inside)
    tl.store(places + row, (slot + PAGE) % PAGE, mask=inside)


def place_rows(
    first: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    depths: torch.Tensor,
    lines: torch.Tensor | None,
    highest: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, pages and offsets in them of rows, int64 [rows] each: `Lanes.rows`."""
    lanes, width = tables.shape
    rows = lanes * offsets.shape[-1] if lines is None else len(lines)
    positions, pages, places = (torch.empty(rows, dtype=torch.int64, device=first.device) for _ in range(3))
    if rows:
        _place_rows[(triton.cdiv(rows, _ROWS),)](
            *(first, tables, first if lines is None else lines, offsets.contiguous(), depths.contiguous()),
            *(positions, pages, places, rows, rows // lanes, width, highest),
            PAGE=page_size,
            GIVEN=lines is not None,
            OWN_OFFSETS=offsets.numel() == rows,
            OWN_DEPTHS=depths.numel() == rows,
            BLOCK=_ROWS,
            num_warps=1,
        )
    return positions, pages, places


@triton.jit(do_not_specialize=["nodes"])
def _advance(
    chosen,  # int64 [lanes, nodes]
    path,  # int64 [lanes, DEPTH]
    counts,  # int64 [lanes]
    depths,  # int64 [lanes, nodes]
    tokens,  # int64 [lanes, nodes]
    last_tokens,  # int64 [lanes, DEPTH + 1]
    accepted,  # int64 [lanes]
    slots,  # int64 [lanes]
    results,  # int64 [rounds, lanes, WIDTH]
    number,  # int64 [1]
    nodes,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,  # rounded up to a power of two
):
    """Advance one lane."""
    lane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place <= DEPTH
    node = tl.load(path + lane * DEPTH + place - 1, mask=inside & (place > 0), other=0)
    choice = tl.load(chosen + lane * nodes + node, mask=inside, other=0)  # each is its parent's choice
    count = tl.load(counts + lane)
    tl.store(last_tokens + lane * (DEPTH + 1) + place, choice, mask=inside)
    tl.store(accepted + lane, count)
    tl.store(tokens + lane * nodes, tl.sum(tl.where(place == count, choice, 0), 0))
    tl.store(slots + lane, tl.load(slots + lane) + count + 1)
    every = tl.arange(0, NODES)
    deepest = tl.max(tl.load(depths + lane * nodes + every, mask=every < nodes, other=0), 0)
    line = results + (tl.load(number) * tl.num_programs(0) + lane) * WIDTH
    tl.store(line, count)
    tl.store(line + 1, deepest)
    tl.store(line + 2 + place, choice, mask=inside)


def advance(
    chosen: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    depths: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    accepted: torch.Tensor,
    slots: torch.Tensor,
    results: torch.Tensor,
    number: torch.Tensor,
) -> None:
    """`Lanes.advance`; tokens, last_tokens, accepted and slots are the lanes' own."""
    lanes, depth = path.shape
    nodes = tokens.shape[1]
    _advance[(lanes,)](
        *(chosen, path, counts, depths, tokens, last_tokens, accepted, slots, results, number, nodes),
        DEPTH=depth,
        WIDTH=results.shape[2],
        BLOCK=triton.next_power_of_2(depth + 1),
        NODES=triton.next_power_of_2(nodes),
        num_warps=1,
    )


@triton.jit
def _page(tables, lane, width, slot, mask, PAGE: tl.constexpr):
    """The pages of a lane's slots."""
    return tl.load(tables + lane * width + slot // PAGE, mask=mask, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["width"])
def _move(
    data,  # [layers * 2, pages, KV_HEADS, PAGE, SIZE]
    tables,  # int32 [lanes, width]
    slots,  # int64 [lanes]
    path,  # int64 [lanes, DEPTH]
    width,
    pages,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,  # DEPTH and SIZE rounded up to powers of two
    PADDED: tl.constexpr,
):
    """Move the rows of one lane, in one layer's keys or values of one head."""
    lane, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK)
    node = tl.load(path + lane * DEPTH + place, mask=place < DEPTH, other=0)
    moved = node > place + 1  # a node's index is never below its depth; 0 is after the end of a path
    start = tl.load(slots + lane)
    here, there = start + node, start + place + 1
    first = part // KV_HEADS * pages
    head = part % KV_HEADS
    source = ((first + _page(tables, lane, width, here, moved, PAGE)) * KV_HEADS + head) * PAGE + here % PAGE
    target = ((first + _page(tables, lane, width, there, moved, PAGE)) * KV_HEADS + head) * PAGE + there % PAGE
    dims = tl.arange(0, PADDED)
    mask = moved[:, None] & (dims < SIZE)[None, :]
    rows = tl.load(data + source[:, None] * SIZE + dims[None, :], mask=mask, other=0.0)
    tl.debug_barrier()  # the rows read may be the rows written below
    tl.store(data + target[:, None] * SIZE + dims[None, :], rows, mask=mask)


def move(data: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, path: torch.Tensor) -> None:
    """`Lanes.move`."""
    layers, both, pages, kv_heads, page, size = data.shape
    lanes, depth = path.shape
    _move[lanes, layers * both * kv_heads](
        *(data, tables, slots, path, tables.shape[1], pages),
        KV_HEADS=kv_heads,
        PAGE=page,
        SIZE=size,
        DEPTH=depth,
        BLOCK=triton.next_power_of_2(depth),
        PADDED=triton.next_power_of_2(size),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["width", "nodes"])
def _store_features(
    data,  # [pages, PAGE, whole]
    hidden,  # [lanes * nodes, part]
    tables,  # int32 [lanes, width]
    slots,  # int64 [lanes]
    path,  # int64 [lanes, DEPTH]
    width,
    nodes,
    whole,
    part,
    first,  # where the part begins in a row of `data`
    PAGE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store some columns of one row: the root's, or that of a node on the path."""
    lane, place = tl.program_id(0).to(tl.int64) // (DEPTH + 1), tl.program_id(0) % (DEPTH + 1)
    node = tl.load(path + lane * DEPTH + place - 1, mask=place > 0, other=0)
    slot = tl.load(slots + lane) + place
    page = tl.load(tables + lane * width + slot // PAGE).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < part
    row = tl.load(hidden + (lane * nodes + node) * part + column, mask=inside, other=0.0)
    line = data + (page * PAGE + slot % PAGE) * whole + first
    tl.store(line + column, row.to(data.dtype.element_ty), mask=inside)


def store_features(
    data: torch.Tensor, taps: Sequence[torch.Tensor], tables: torch.Tensor, slots: torch.Tensor, path: torch.Tensor
) -> None:
    """`Lanes.store_features`."""
    (lanes, depth), (_, page, whole) = path.shape, data.shape
    first = 0
    for tap in taps:
        rows, part = tap.shape
        _store_features[lanes * (depth + 1), triton.cdiv(part, _COLUMNS)](
            *(data, tap, tables, slots, path, tables.shape[1], rows // lanes, whole, part, first),
            PAGE=page,
            DEPTH=depth,
            BLOCK=_COLUMNS,
        )
        first += part


@triton.jit(do_not_specialize=["width"])
def _features_before(
    data, tables, slots, accepted, out, width, whole, FRESH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Read some columns of one row, that before one of the last tokens."""
    row = tl.program_id(0).to(tl.int64)
    lane, place = row // FRESH, row % FRESH
    slot = tl.load(slots + lane) - tl.load(accepted + lane) - 1 + place
    known = slot >= 0
    slot = tl.maximum(slot, 0)
    page = tl.load(tables + lane * width + slot // PAGE).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < whole
    line = data + (page * PAGE + slot % PAGE) * whole
    tl.store(out + row * whole + column, tl.load(line + column, mask=inside & known, other=0.0), mask=inside)


def features_before(
    data: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, fresh: int
) -> torch.Tensor:
    """`Lanes.features_before`."""
    (lanes, width), (_, page, whole) = tables.shape, data.shape
    out = data.new_empty(lanes * fresh, whole)
    _features_before[lanes * fresh, triton.cdiv(whole, _COLUMNS)](
        *(data, tables, slots, accepted, out, width, whole),
        FRESH=fresh,
        PAGE=page,
        BLOCK=_COLUMNS,
    )
    return out
