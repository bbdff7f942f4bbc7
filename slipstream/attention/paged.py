"""Tree attention on a GPU: one Triton kernel over the pages of all sequences, whatever rows each brings.

A program takes the rows of a tile for the query heads of one KV head, and a share of the columns: with few sequences
the context is split among programs, and a second, small kernel puts the shares together. Into how many shares depends
on the number of tiles and on nothing else (rounded up to a power of two, as batches of captured passes are filled up),
so that a sequence is split alike whether its pass is captured or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.attention.segment import Segment
from slipstream.attention.tiles import Tiles
from slipstream.cache import PAGE_SIZE, LayerStore
from slipstream.fused import has_triton

_PROGRAMS = 256  # enough to keep a large GPU busy; more of them have more to put together afterwards
_MOST_SPLITS = 64
_STAGES = 2
_WARPS, _FEW_WARPS = 4, 2
_FEW_QUERIES = 16
_BLOCK_BYTES = 16_384  # of the keys that a program holds at a time
_MOST_COLUMNS, _LEAST_COLUMNS = 64, 16


def paged_available(device: str) -> bool:
    """Whether PagedAttention can run on `device`: a GPU, and triton is installed."""
    return device.startswith("cuda") and has_triton()


class PagedAttention:
    """Attention of one pass: built once, then called for every layer. `BlockAttention` elsewhere than on a GPU."""

    def __init__(
        self,
        segments: Sequence[Segment],
        heads: int,
        kv_heads: int,
        size: int,
        device: str,
        softcap: float | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        """`tiles`: the rows as they were laid out before, in place of segments."""
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._size = size
        self._softcap = softcap
        self._tiles = Tiles.of(segments, self._group, device) if tiles is None else tiles
        count = self._tiles.fields.shape[1]
        self._splits = splits(count, kv_heads)
        self._lone = count == self._tiles.rows  # a row each
        # Many small trees: programs of half the size leave each other room.
        crowded = not self._lone and count * kv_heads > _PROGRAMS and self._tiles.queries <= _FEW_QUERIES
        self._warps = _FEW_WARPS if crowded else _WARPS

    def __call__(self, q: torch.Tensor, layer: LayerStore, window: int | None) -> torch.Tensor:
        """Queries, already scaled (and divided by a soft cap, if there is one), over one layer's pages.

        q is [rows, heads * size or more]: keys and values may stand behind the queries, as a fused product leaves them.
        Returns [rows, heads * size] in the type of q, which is that of the pages; sums are made in float32.
        """
        from slipstream.attention.kernels import attend, combine

        tiles, kv_heads, group, size, shares = self._tiles, self._kv_heads, self._group, self._size, self._splits
        heads = kv_heads * group
        padded = 1 << (size - 1).bit_length()
        out = q.new_empty(tiles.rows, heads * size)
        parts = marks = out  # not touched where there is one split
        if shares > 1:
            parts = q.new_empty((shares, tiles.rows, heads, size), dtype=torch.float32)
            marks = q.new_empty((2, shares, tiles.rows, heads), dtype=torch.float32)
        exact = q.dtype == torch.float32
        attend[tiles.fields.shape[1], kv_heads, shares](
            q,
            layer.keys,
            layer.values,
            out,
            parts,
            marks,
            tiles.fields,
            tiles.tables,
            tiles.positions,
            tiles.open_positions,
            tiles.bits,
            tiles.fields.shape[1],
            tiles.rows,
            q.stride(0),
            tiles.tables.shape[1],
            tiles.bits.shape[1],
            0 if window is None else window,
            1.0 if self._softcap is None else self._softcap,
            KV_HEADS=kv_heads,
            GROUP=group,
            SIZE=size,
            PADDED=padded,
            PAGE=PAGE_SIZE,
            BLOCK_M=tiles.queries,
            BLOCK_N=block_columns(padded * q.dtype.itemsize),
            SPLITS=shares,
            TREES=tiles.trees,
            WINDOWED=window is not None,
            CAPPED=self._softcap is not None,
            PRECISION="ieee" if exact else "tf32",
            num_warps=self._warps,
            num_stages=1 if self._lone and shares > 1 else _STAGES,  # up to some thousand tokens it has a block or two
        )
        if shares > 1:
            lines = tiles.rows * heads
            warps = 1 if shares * padded <= 4096 else 4
            combine[lines,](parts, marks, out, lines, SIZE=size, PADDED=padded, SPLITS=shares, num_warps=warps)
        return out


def splits(tiles: int, kv_heads: int) -> int:
    """How many programs share the columns of a sequence: a power of two."""
    alone = kv_heads << (tiles - 1).bit_length()
    return 1 << min(_MOST_SPLITS, max(1, _PROGRAMS // alone)).bit_length() - 1


def block_columns(row_bytes: int) -> int:
    """Columns of one product: fewer where the heads are wide. A power of two, so that pages are whole blocks."""
    columns = _MOST_COLUMNS
    while columns > _LEAST_COLUMNS and columns * row_bytes > _BLOCK_BYTES:
        columns //= 2
    return columns
