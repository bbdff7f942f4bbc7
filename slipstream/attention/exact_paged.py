"""Batch-invariant tree attention on a GPU: a row has the same bits in every pass.

Every row sums over its own columns in the order of their positions, wherever they are stored: the committed ones, then
its ancestors in the open tree. Blocks and shares are cut at fixed positions and combined in a fixed order, so that a
node of a tree, a token of a prompt and a single token at the same position go through the same arithmetic. The number
of programs, and the rows that each processes, affect the speed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from slipstream.attention.segment import Segment
from slipstream.attention.tiled import TiledAttention
from slipstream.cache import PAGE_SIZE, LayerStore

_QUERIES = 16  # queries of one program, in every pass: the smallest `tl.dot` on tensor cores
_SHARE = 256  # columns of a share: several programs may process the shares of a long context
_AT_ONCE = 16  # shares that are combined at a time
_PROGRAMS = 1024  # enough to keep a large GPU busy
_PARTS_BYTES = 2**26  # workspace for the shares; a long prompt is processed in several launches


class ExactPagedAttention(TiledAttention):
    """Attention of one pass: built once, then called for every layer."""

    def _cut(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        for segment in segments:
            yield from without_trunk(segment)

    def _prepare(self) -> None:
        tiles = self._tiles
        self._shares = -(-tiles.tables.shape[1] * PAGE_SIZE // _SHARE)
        self._queries = 1 << (max(_QUERIES, self._group) - 1).bit_length()
        count, height = tiles.fields.shape[1], tiles.queries // self._group
        self._rows_each = 1 if tiles.lone else self._queries // self._group
        self._pieces = 1 if tiles.lone else -(-height // self._rows_each)
        self._lengths, self._ancestors = self._laid_out(count, height)

    def _laid_out(self, count: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
        """How many columns each row sees, int32 [rows], and which are its ancestors', int32 [rows, columns]."""
        from slipstream.attention.exact_paged_kernels import lay_out

        tiles = self._tiles
        words = tiles.bits.shape[1]
        lengths = tiles.fields.new_empty(tiles.rows, dtype=torch.int32)
        ancestors = lengths.new_empty(tiles.rows if tiles.trees else 1, 32 * words)
        block = 32 << (words - 1).bit_length()
        lay_out[count, height](
            tiles.fields, tiles.bits, lengths, ancestors, count, words, 32 * words, BLOCK=block, num_warps=1
        )
        return lengths, ancestors

    def __call__(self, q: torch.Tensor, layer: LayerStore, window: int | None) -> torch.Tensor:
        """Queries, already scaled (and divided by a soft cap, if there is one), over one layer's pages.

        q is [rows, heads * size or more]: keys and values may follow the queries, as a fused GEMM leaves them.
        Returns [rows, heads * size] in the type of q, which is that of the pages; sums are made in float32.
        """
        tiles, heads = self._tiles, self._kv_heads * self._group
        out = q.new_empty(tiles.rows, heads * self._size)
        programs = tiles.fields.shape[1] * self._pieces
        lines = self._rows_each * heads * self._shares  # of one program, for all KV heads
        most = max(1, _PARTS_BYTES // (4 * lines * self._size))
        parts = q.new_empty((min(programs, most) * lines, self._size), dtype=torch.float32)
        marks = q.new_empty((2, len(parts)), dtype=torch.float32)
        for start in range(0, programs, most):
            self._run(q, layer, window, out, (parts, marks), start, min(most, programs - start))
        return out

    def _run(
        self,
        q: torch.Tensor,
        layer: LayerStore,
        window: int | None,
        out: torch.Tensor,
        space: tuple[torch.Tensor, torch.Tensor],
        start: int,
        programs: int,
    ) -> None:
        """Some of the programs, from `start` on; `space` receives the results of their shares."""
        from slipstream.attention.exact_paged_kernels import attend, combine

        tiles, kv_heads = self._tiles, self._kv_heads
        heads = kv_heads * self._group
        parts, marks = space
        layout = tiles.fields.shape[1], start, self._pieces, self._rows_each
        back = 0 if window is None else window
        takers = min(self._shares, max(1, _PROGRAMS // (programs * kv_heads)))
        attend[programs, kv_heads, takers](
            *(q, layer.keys, layer.values, parts, marks, tiles.fields, tiles.tables, self._lengths, self._ancestors),
            *layout,
            *(q.stride(0), tiles.tables.shape[1], self._ancestors.shape[1], self._shares, marks.shape[1], back),
            1.0 if self._softcap is None else self._softcap,
            BLOCK_M=self._queries,
            SHARE=_SHARE,
            **self._constants(q, window),
            num_warps=4,
            num_stages=2 if q.dtype == torch.float32 else 3,
        )
        combine[programs * self._rows_each, heads](
            *(parts, marks, out, tiles.fields, self._lengths),
            *layout,
            *(self._shares, marks.shape[1], back),
            HEADS=heads,
            SIZE=self._size,
            PADDED=self._padded,
            SHARE=_SHARE,
            AT_ONCE=_AT_ONCE,
            WINDOWED=window is not None,
            num_warps=4,
        )


def without_trunk(segment: Segment) -> Iterator[Segment]:
    """The same rows, those before the first fork as a chain of their own: what is left has bits for the tree alone.

    A column whose position no other open column has is seen by every row after it.
    """
    if segment.causal:
        yield segment
        return
    forks = np.flatnonzero(np.bincount(segment.open_positions - segment.committed) != 1)
    trunk = int(forks[0]) if len(forks) else len(segment.open_positions)
    chain = max(0, trunk - segment.earlier)  # of the trunk's columns, those that are new rows
    if chain:
        start = segment.first_slot
        positions = np.arange(start, start + chain)
        visible = np.tri(chain, dtype=np.bool_)
        yield Segment(segment.table, start, segment.tokens[:chain], positions, visible, chain, causal=True)
    if chain < segment.rows:
        yield replace(
            segment,
            committed=segment.committed + trunk,
            tokens=segment.tokens[chain:],
            open_positions=segment.open_positions[trunk:],
            visible=segment.visible[chain:, trunk:],
            logits_from=0,
            prepared=None,
        )
