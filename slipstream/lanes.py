"""Lanes: what a device knows of a batch while the host looks away, one lane for each sequence.

A round brings every lane's root and a tree below it to the target, and moves the lane on to the end of the accepted
path. All of it is in tensors that stay where they are, so that a round can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from slipstream import noise
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache
from slipstream.fused import runs_fused
from slipstream.sequence import Sequence


class Lanes:
    """The buffers of a batch, filled up with idle lanes to one of a few sizes."""

    def __init__(self, size: int, nodes: int, depth: int, longest: int, spare: int, device: str) -> None:
        """Trees of `nodes` nodes beside the root and `depth` levels. `longest`: tokens that a sequence may have, and
        `spare`: rows that may be written behind the last of them.
        """
        self.size = size
        self.nodes = nodes
        self.depth = depth
        self.highest = longest - 1  # no position is above it; rows behind the last one are never kept
        self.device = device

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        pages = -(-(longest + spare) // PAGE_SIZE)
        self.tables = torch.zeros(size, pages, dtype=torch.int32, device=device)
        self.slots = numbers(size)  # of the roots: the rows before them are committed
        self.stems = numbers(2, size)  # of the samplers
        self.temperatures = torch.zeros(size, dtype=torch.float32, device=device)
        self.tokens = numbers(size, 1 + nodes)  # of the trees, the roots first
        self.parents = numbers(size, 1 + nodes)
        # What came last: tokens of which the root is the last, and how many stand before it.
        self.taken = numbers(size, depth + 1)
        self.accepted = numbers(size)

    def fill(self, sequences: list[Sequence], known: list[int], idle: int) -> None:
        """Set the lanes up for sequences whose slots are reserved.

        `known`: how many tokens of each are to be taken as known, all but the last few. `idle`: a page for the lanes
        that have no sequence.
        """
        spare = self.size - len(sequences)
        tables = np.full((self.size, self.tables.shape[1]), idle, dtype=np.int32)
        for table, sequence in zip(tables, sequences, strict=False):
            table[: len(sequence.table.pages)] = sequence.table.pages
        slots = [s.cached for s in sequences] + [0] * spare
        taken = np.zeros((self.size, self.taken.shape[1]), dtype=np.int64)
        for line, sequence, start in zip(taken, sequences, known, strict=False):
            line[: len(sequence.tokens) - start] = sequence.tokens[start:]
        accepted = [len(s.tokens) - 1 - start for s, start in zip(sequences, known, strict=True)] + [0] * spare
        self.tables.copy_(torch.from_numpy(tables))
        self.slots.copy_(torch.tensor(slots))
        self.taken.copy_(torch.from_numpy(taken))
        self.accepted.copy_(torch.tensor(accepted))
        self.tokens[:, 0].copy_(torch.tensor([s.tokens[-1] for s in sequences] + [0] * spare))
        self.stems.copy_(noise.halves([s.sampler.stem for s in sequences] + [0] * spare))
        self.temperatures.copy_(torch.tensor([s.params.temperature for s in sequences] + [0.0] * spare))

    def rows(self, first: torch.Tensor, offsets: torch.Tensor, depths: torch.Tensor | None = None) -> LaneRows:
        """Rows of every lane: slots `offsets` [rows] behind `first` [lanes], where positions go on alike.

        `depths`, [lanes, rows] or [rows]: how far the positions are behind `first`, where that is another matter.
        """
        return self._laid(first, offsets, offsets if depths is None else depths)

    def rows_behind_roots(self, lines: torch.Tensor, offsets: torch.Tensor, depths: torch.Tensor) -> LaneRows:
        """The same behind the roots for rows in any order, [rows] each: `lines` says which lane each is of."""
        return self._laid(self.slots, offsets, depths, lines)

    def _laid(
        self, first: torch.Tensor, offsets: torch.Tensor, depths: torch.Tensor, lines: torch.Tensor | None = None
    ) -> LaneRows:
        if runs_fused(first):
            from slipstream.lane_kernels import lay

            laid = lay(first, self.tables, offsets, depths, lines, self.highest, PAGE_SIZE)
            return LaneRows(laid[0], self.highest, *laid[1:])
        if lines is None:
            lines = torch.arange(self.size, device=first.device)[:, None]
        start = first[lines]
        slots, positions = start + offsets, (start + depths).clamp(0, self.highest)
        pages = self.tables[lines, slots.clamp_min(0) // PAGE_SIZE].long()
        return LaneRows(positions.flatten(), self.highest, pages.flatten(), slots.flatten() % PAGE_SIZE)

    def advance(self, chosen: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> None:
        """Take the accepted path [lanes, depth], and as the new root the target's choice behind it.

        `chosen` [lanes, 1 + nodes]: the target's choices behind all nodes; `accepted` [lanes]: the length of the path.
        """
        if runs_fused(chosen):
            from slipstream.lane_kernels import advance

            advance(chosen, path, accepted, self.tokens, self.taken, self.accepted, self.slots)
            return
        self.taken.copy_(chosen.gather(1, torch.nn.functional.pad(path, (1, 0))))  # each is what its parent chose
        self.accepted.copy_(accepted)
        self.tokens[:, 0].copy_(self.taken.gather(1, accepted[:, None])[:, 0])
        self.slots += accepted + 1


class LaneRows:
    """The rows of one pass, [rows] each: as many of every lane."""

    def __init__(self, positions: torch.Tensor, highest: int, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        self.positions = positions
        self.highest = highest
        self._pages = pages
        self._offsets = offsets
        self.places = (pages, offsets) if pages.is_cuda else None

    def split(self, sizes: Seq[int]) -> list[LaneRows]:
        """So many of them each, in their order."""
        parts = zip(*(part.split(sizes) for part in (self.positions, self._pages, self._offsets)), strict=True)
        return [LaneRows(positions, self.highest, pages, offsets) for positions, pages, offsets in parts]

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Put k and v [2, kv heads, rows, size] into one layer."""
        layer.both[:, self._pages, :, self._offsets] = kv.permute(2, 0, 1, 3)

    def read(self, data: torch.Tensor) -> torch.Tensor:
        """Of [pages, PAGE_SIZE, width], the rows' own, [rows, width]."""
        return data[self._pages, self._offsets]

    def keep(self, data: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [rows, width] into [pages, PAGE_SIZE, width]."""
        data[self._pages, self._offsets] = values.to(data.dtype)

    def move(self, cache: PagedCache, store: str, to: LaneRows) -> None:
        """Copy these rows of a store, in all its layers, to where others lie; all are read before one is written."""
        data = cache.stores[store]
        data[:, :, to._pages, :, to._offsets] = data[:, :, self._pages, :, self._offsets]
