"""Tree attention on a GPU: one Triton kernel over the pages of all sequences, for any mix of rows.

A program processes the rows of a tile for the query heads of one KV head, over one split of the columns: with few
sequences the context is split among programs, and a second, small kernel combines the splits. The number of splits
depends on the number of tiles alone (rounded up to a power of two, because captured passes pad their batches), so a
sequence is split in the same way whether its pass is captured or not.
"""

from __future__ import annotations

import itertools

import torch

from slipstream.attention.tiled import TiledAttention
from slipstream.attention.tiles import idle_tiles, query_blocks
from slipstream.cache import LayerStore
from slipstream.gpu.fused import has_triton

_PROGRAMS = 256  # enough to keep a large GPU busy; with more programs, combining the splits takes longer
_MOST_SPLITS = 64
_STAGES = 2
_WARPS, _FEW_WARPS = 4, 2
_FEW_QUERIES = 16
_KINDS = ((False, False), (False, True), (True, False))  # (trees, lone): a lone root is a chain


def paged_available(device: str) -> bool:
    """Whether PagedAttention can run on `device`: a GPU, and triton is installed."""
    return device.startswith("cuda") and has_triton()


class PagedAttention(TiledAttention):
    """Attention of one pass: built once, then called for every layer. `BlockAttention` elsewhere than on a GPU."""

    def _prepare(self) -> None:
        count = self._tiles.fields.shape[1]
        self._splits = splits(count, self._kv_heads)
        # Many small trees: programs of half the size leave each other room.
        crowded = not self._tiles.lone and count * self._kv_heads > _PROGRAMS and self._tiles.queries <= _FEW_QUERIES
        self._warps = _FEW_WARPS if crowded else _WARPS

    def __call__(self, q: torch.Tensor, layer: LayerStore, window: int | None) -> torch.Tensor:
        """Queries, already scaled (and divided by a soft cap, if there is one), over one layer's pages.

        q is [rows, heads * size or more]: keys and values may follow the queries, as a fused GEMM leaves them.
        Returns [rows, heads * size] in the type of q, which is that of the pages; sums are made in float32.
        """
        from slipstream.attention.paged_kernels import attend, combine

        tiles, size, padded, shares = self._tiles, self._size, self._padded, self._splits
        heads = self._kv_heads * self._group
        out = q.new_empty(tiles.rows, heads * size)
        parts = marks = out  # not touched where there is one split
        if shares > 1:
            parts = q.new_empty((shares, tiles.rows, heads, size), dtype=torch.float32)
            marks = q.new_empty((2, shares, tiles.rows, heads), dtype=torch.float32)
        attend[tiles.fields.shape[1], self._kv_heads, shares](
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
            shares,
            1.0 if self._softcap is None else self._softcap,
            BLOCK_M=tiles.queries,
            TREES=tiles.trees,
            **self._constants(q, window),
            num_warps=self._warps,
            num_stages=1 if tiles.lone and shares > 1 else _STAGES,  # up to some thousand tokens it has a block or two
        )
        if shares > 1:
            lines = tiles.rows * heads
            warps = 1 if shares * padded <= 4096 else 4
            combine[lines,](parts, marks, out, lines, SIZE=size, PADDED=padded, SPLITS=shares, num_warps=warps)
        return out


def compile_kernels(
    heads: int, kv_heads: int, size: int, softcap: float | None, layer: LayerStore, window: int | None
) -> None:
    """Compile every variant that host-driven passes over such layers can need, so that no request waits for it.

    Tiles without rows are enough. `layer`: any layer of the store.
    """
    device, group = str(layer.keys.device), heads // kv_heads
    q = layer.keys.new_empty(_PROGRAMS, (heads + 2 * kv_heads) * size)  # as wide as the GEMM leaves them
    for queries in query_blocks(group):
        few = [1 << power for power in range(_PROGRAMS.bit_length())]  # tiles: every number of splits
        for count, (trees, lone) in itertools.product(few, _KINDS):
            tiles = idle_tiles(count, queries, trees=trees, lone=lone, device=device)
            PagedAttention((), heads, kv_heads, size, device, softcap, tiles)(q[: tiles.rows], layer, window)


def splits(tiles: int, kv_heads: int) -> int:
    """How many programs share the columns of a sequence: a power of two."""
    alone = kv_heads << (tiles - 1).bit_length()
    return 1 << min(_MOST_SPLITS, max(1, _PROGRAMS // alone)).bit_length() - 1
