"""Tiles: the rows of a pass that the paged kernels process together, and what each row sees, as arrays.

A tile is a few rows of one sequence; with the query heads of one KV head they make the query block of one program. Rows
of a chain (a chunk of a prompt, a single token) see every column up to their own, which needs no mask. Rows of a tree
have a bit for each open column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention.segment import Segment

# The fields of a tile, as the kernels read them.
ROW = 0  # the tile's first row
COUNT = 1  # how many rows it has
TABLE = 2  # its row of the page tables
SLOT = 3  # slot of its first row
COMMITTED = 4  # columns that every row sees
STOP = 5  # one past the last open column; rows of chains end at their own
OPEN = 6  # where the open columns' positions begin; -1 for a chain
FACTS = 7

_MOST_QUERIES = 64  # queries of one program at most
_LEAST_QUERIES = 16  # the smallest `tl.dot` on tensor cores
_ALIGN = 4  # elements: kernels are compiled anew for arrays that are not aligned to 16 bytes

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tiles:
    """The rows of a pass, tile by tile."""

    rows: int
    queries: int  # query rows of one tile: its rows times their query heads, padded to a power of two
    trees: bool  # whether any tile has rows of a tree
    lone: bool  # whether every tile is known to have one row at most
    fields: torch.Tensor  # [FACTS, tiles]; these and positions are int32, or int64 if lanes made them
    tables: torch.Tensor  # int32 [sequences, pages of the longest]
    positions: torch.Tensor  # [rows]
    open_positions: torch.Tensor  # tree after tree
    bits: torch.Tensor  # int32 [rows, words]

    @classmethod
    def of(cls, segments: Sequence[Segment], group: int, device: str) -> Tiles:
        """The tiles of a ragged pass; `group` query heads share a KV head."""
        queries = query_block(group, max(s.rows for s in segments))
        rows, trees = sum(s.rows for s in segments), any(not s.causal for s in segments)
        arrays = tile_arrays(segments, queries // group)
        return cls(rows, queries, trees, rows == len(segments), *_to_device(arrays, device))


def tile_arrays(segments: Sequence[Segment], height: int) -> list[Numbers]:
    """Fields, tables, positions, open positions and bits of a ragged pass with tiles of at most `height` rows."""
    trees = [s for s in segments if not s.causal]
    facts: list[Numbers] = []
    row = opened = 0
    for number, segment in enumerate(segments):
        starts = np.arange(0, segment.rows, height, dtype=np.int32)
        fact = np.empty((FACTS, len(starts)), dtype=np.int32)
        fact[ROW] = row + starts
        fact[COUNT] = np.minimum(height, segment.rows - starts)
        fact[TABLE] = number
        fact[SLOT] = segment.first_slot + starts
        fact[COMMITTED] = segment.committed
        fact[STOP] = segment.committed + len(segment.open_positions)
        fact[OPEN] = -1 if segment.causal else opened
        facts.append(fact)
        row += segment.rows
        opened += 0 if segment.causal else len(segment.open_positions)
    arrays = [np.concatenate(facts, axis=1), _tables(segments)]
    if not trees:
        return [*arrays, np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)]
    positions = np.concatenate([s.positions for s in segments]).astype(np.int32)
    return [*arrays, positions, np.concatenate([s.open_positions for s in trees]).astype(np.int32), _bits(segments)]


class LaneTiles:
    """Tiles of passes with the same number of rows for every sequence, at any position.

    Everything that depends on the positions is computed on the device, so that such a pass can be captured.
    """

    def __init__(
        self, tables: torch.Tensor, rows: int, group: int, *, earlier: int = 0, open_rows: bool = False
    ) -> None:
        """`rows` new rows for each line of `tables`, int32 [sequences, pages], which the caller may rewrite.

        `open_rows`: rows of trees, of which `earlier` ones were written before; otherwise the rows are chains.
        """
        queries = query_block(group, rows)
        starts = np.arange(0, rows, queries // group)
        lanes, tiles = len(tables), len(starts)
        base = np.zeros((FACTS, lanes, tiles), dtype=np.int64)
        numbers = np.arange(lanes)[:, None]
        base[ROW] = numbers * rows + starts
        base[COUNT] = np.minimum(queries // group, rows - starts)
        base[TABLE] = numbers
        base[SLOT] = earlier + starts
        base[STOP] = earlier + rows
        base[OPEN] = numbers * (earlier + rows) if open_rows else -1
        moving = np.zeros((FACTS, 1, 1), dtype=np.int64)
        moving[[SLOT, COMMITTED, STOP]] = 1
        self._base, self._moving = (torch.from_numpy(part).to(tables.device) for part in (base, moving))
        self._tables = tables
        self._rows = lanes * rows
        self._lone = rows == 1
        self._queries = queries
        self._nothing = torch.zeros(1, 1, dtype=torch.int32, device=tables.device)

    def after(
        self, committed: torch.Tensor, bits: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> Tiles:
        """The tiles after `committed` rows of each sequence, [sequences].

        For rows of trees: `bits` int32 [rows, words], and `positions` [rows]. Windows are supported only without
        `earlier` rows.
        """
        fields = torch.addcmul(self._base, self._moving, committed[:, None])
        nothing = self._nothing
        places = nothing[0] if positions is None else positions
        open_rows = bits is not None
        return Tiles(
            self._rows,
            self._queries,
            open_rows,
            self._lone,
            fields.flatten(1),
            self._tables,
            places,
            places,
            nothing if bits is None else bits,
        )


def query_block(group: int, rows: int) -> int:
    """Queries of one program if the longest segment has `rows` rows: a power of two, at least one whole row."""
    wanted = max(group, min(group * rows, _MOST_QUERIES), _LEAST_QUERIES)
    return 1 << (wanted - 1).bit_length()


def query_blocks(group: int) -> list[int]:
    """All values that `query_block` can return."""
    return sorted({query_block(group, rows) for rows in range(1, _MOST_QUERIES + 1)})


def idle_tiles(count: int, queries: int, *, trees: bool, lone: bool, device: str) -> Tiles:
    """Tiles without rows, in the layout of a host-driven pass."""
    fields = torch.zeros(FACTS, count, dtype=torch.int32, device=device)
    nothing = fields.new_zeros(count, 1)
    return Tiles(count, queries, trees, lone, fields, nothing, nothing[:, 0], nothing[:, 0], nothing)


def _tables(segments: Sequence[Segment]) -> Numbers:
    tables = np.zeros((len(segments), max(len(s.table.pages) for s in segments)), dtype=np.int32)
    for number, segment in enumerate(segments):
        tables[number, : len(segment.table.pages)] = segment.table.pages
    return tables


def _bits(segments: Sequence[Segment]) -> Numbers:
    """[rows, words]: bit j of a row's words is set if the row sees open column j."""
    words = max(-(-len(s.open_positions) // 32) for s in segments if not s.causal)
    packed = np.zeros((sum(s.rows for s in segments), 4 * words), dtype=np.uint8)
    row = 0
    for segment in segments:
        if not segment.causal:
            bytes_ = np.packbits(segment.visible, axis=1, bitorder="little")
            packed[row : row + segment.rows, : bytes_.shape[1]] = bytes_
        row += segment.rows
    return packed.view("<i4")


def _to_device(arrays: list[Numbers], device: str) -> list[torch.Tensor]:
    """All arrays in one copy to the device, each aligned to 16 bytes."""
    sizes = [-(-array.size // _ALIGN) * _ALIGN for array in arrays]
    flat = np.zeros(sum(sizes), dtype=np.int32)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.size] = array.ravel()
        start += size
    pieces = torch.from_numpy(flat).to(device).split(sizes)
    return [piece[: array.size].view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]
