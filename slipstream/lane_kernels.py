# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `lanes.py`. Importing this file imports triton: it is done late, and only on a GPU.

What they compute takes a dozen plain operations of a few numbers each, and every one of those costs a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 128  # of one program


@triton.jit(do_not_specialize=["rows", "each", "width", "highest"])
def _lay(
    first,  # int64 [lanes]
    tables,  # int32 [lanes, width]
    lines,  # int64 [rows]: the lanes of the rows; GIVEN says whether it counts, else each lane has `each` rows
    offsets,  # int64 [rows], or [each] for every lane alike
    depths,  # the same
    positions,  # int64 [rows], and so are those below
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


def lay(
    first: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    depths: torch.Tensor,
    lines: torch.Tensor | None,
    highest: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, pages and places in them of rows, int64 [rows] each, as `Lanes` lays them."""
    lanes, width = tables.shape
    rows = lanes * offsets.shape[-1] if lines is None else len(lines)
    positions, pages, places = (torch.empty(rows, dtype=torch.int64, device=first.device) for _ in range(3))
    if rows:
        _lay[(triton.cdiv(rows, _ROWS),)](
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
    tokens,  # int64 [lanes, nodes]
    taken,  # int64 [lanes, DEPTH + 1]
    accepted,  # int64 [lanes]
    slots,  # int64 [lanes]
    nodes,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One lane."""
    lane = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place <= DEPTH
    node = tl.load(path + lane * DEPTH + place - 1, mask=inside & (place > 0), other=0)
    choice = tl.load(chosen + lane * nodes + node, mask=inside, other=0)  # each is what its parent chose
    count = tl.load(counts + lane)
    tl.store(taken + lane * (DEPTH + 1) + place, choice, mask=inside)
    tl.store(accepted + lane, count)
    tl.store(tokens + lane * nodes, tl.sum(tl.where(place == count, choice, 0), 0))
    tl.store(slots + lane, tl.load(slots + lane) + count + 1)


def advance(
    chosen: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    tokens: torch.Tensor,
    taken: torch.Tensor,
    accepted: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`Lanes.advance`; the last four are the lanes' own."""
    lanes, depth = path.shape
    _advance[(lanes,)](
        *(chosen, path, counts, tokens, taken, accepted, slots, tokens.shape[1]),
        DEPTH=depth,
        BLOCK=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
