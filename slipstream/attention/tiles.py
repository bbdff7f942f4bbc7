"""Which rows of a pass the paged kernel takes together, and what each of them sees: segments as arrays of int32.

A tile is a few rows of one sequence; with the query heads of one KV head they make the query block of one program. Rows
of a chain (a piece of a prompt, a lone token) see every column up to their own, which needs no mask. Rows of a tree
have a bit for each open column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention.segment import Segment

# The facts about a tile, as the kernels read them.
ROW = 0  # the tile's first row
COUNT = 1  # how many rows it has
TABLE = 2  # its line of the page tables
SLOT = 3  # slot of its first row
COMMITTED = 4  # columns that every row sees
STOP = 5  # one past the last open column; chains stop at their own
OPEN = 6  # where the open columns' positions begin; -1 for a chain
FACTS = 7

_MOST_QUERIES = 64  # of one program
_LEAST_QUERIES = 16  # below this there is no product on tensor cores
_ALIGN = 4  # numbers: kernels are compiled anew for arrays that do not begin at 16 bytes

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tiles:
    """The rows of a pass, tile by tile."""

    rows: int
    queries: int  # of one tile, its rows' query heads counted and filled up to a power of two
    trees: bool  # whether any tile has rows of a tree
    fields: torch.Tensor  # int32 [FACTS, tiles]
    tables: torch.Tensor  # int32 [sequences, pages of the longest]
    positions: torch.Tensor  # int32 [rows]
    open_positions: torch.Tensor  # int32, tree after tree
    bits: torch.Tensor  # int32 [rows, words]

    @property
    def slots(self) -> torch.Tensor:
        """Slots of the tiles' first rows, [tiles]: where rows are alone in their tiles, those of the rows."""
        return self.fields[SLOT]

    @classmethod
    def of(cls, segments: Sequence[Segment], group: int, device: str) -> Tiles:
        """The tiles of a ragged pass; `group` query heads share a KV head."""
        queries = query_block(group, max(s.rows for s in segments))
        height = queries // group
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
        if trees:
            arrays.append(np.concatenate([s.positions for s in segments]).astype(np.int32))
            arrays.append(np.concatenate([s.open_positions for s in trees]).astype(np.int32))
            arrays.append(_bits(segments))
        else:
            arrays += [np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)]
        return cls(row, queries, bool(trees), *_sent(arrays, device))

    @classmethod
    def lone(cls, sequences: int, pages: int, group: int, device: str) -> Tiles:
        """One row for each of `sequences`, at slots and in pages that the caller writes in, and may change."""
        fields = torch.zeros(FACTS, sequences, dtype=torch.int32, device=device)
        fields[ROW] = fields[TABLE] = torch.arange(sequences, dtype=torch.int32, device=device)
        fields[COUNT] = 1
        fields[OPEN] = -1
        tables = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(sequences, query_block(group, 1), False, fields, tables, nothing, nothing, nothing[None])


def query_block(group: int, rows: int) -> int:
    """Queries of one program where the longest segment has `rows` rows: a power of two, at least one whole row."""
    wanted = max(group, min(group * rows, _MOST_QUERIES), _LEAST_QUERIES)
    return 1 << (wanted - 1).bit_length()


def _tables(segments: Sequence[Segment]) -> Numbers:
    tables = np.zeros((len(segments), max(len(s.table.pages) for s in segments)), dtype=np.int32)
    for number, segment in enumerate(segments):
        tables[number, : len(segment.table.pages)] = segment.table.pages
    return tables


def _bits(segments: Sequence[Segment]) -> Numbers:
    """[rows, words]: bit j of a row's words is set where the row sees open column j."""
    words = max(-(-len(s.open_positions) // 32) for s in segments if not s.causal)
    packed = np.zeros((sum(s.rows for s in segments), 4 * words), dtype=np.uint8)
    row = 0
    for segment in segments:
        if not segment.causal:
            bytes_ = np.packbits(segment.visible, axis=1, bitorder="little")
            packed[row : row + segment.rows, : bytes_.shape[1]] = bytes_
        row += segment.rows
    return packed.view("<i4")


def _sent(arrays: list[Numbers], device: str) -> list[torch.Tensor]:
    """All arrays in one copy to the device, each beginning at 16 bytes."""
    sizes = [-(-array.size // _ALIGN) * _ALIGN for array in arrays]
    flat = np.zeros(sum(sizes), dtype=np.int32)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.size] = array.ravel()
        start += size
    pieces = torch.from_numpy(flat).to(device).split(sizes)
    return [piece[: array.size].view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]
