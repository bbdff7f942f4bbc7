"""Lanes: what a device knows of a batch while the host looks away, one lane for each sequence.

A round brings every lane's root and a tree below it to the target, and moves the lane on to the end of the accepted
path. All of it is in tensors that stay where they are, so that a round can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from slipstream import noise
from slipstream.cache import PAGE_SIZE, LayerStore
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
        self._pages = np.zeros(self.tables.shape, dtype=np.int32)  # what the tables say
        self.slots = numbers(size)  # of the roots: the rows before them are committed
        self.stems = numbers(2, size)  # of the samplers
        self.temperatures = torch.zeros(size, dtype=torch.float32, device=device)
        # The same for the rows of the target's pass.
        self.row_stems = numbers(2, size * (1 + nodes))
        self.row_temperatures = torch.zeros(size * (1 + nodes), dtype=torch.float32, device=device)
        self.offsets = torch.arange(1 + nodes, device=device)  # of those rows behind the roots
        self._lines = torch.arange(size, device=device)[:, None]
        self.tokens = numbers(size, 1 + nodes)  # of the trees, the roots first
        self.parents = numbers(size, 1 + nodes)
        # What came last: tokens of which the root is the last, and how many stand before it.
        self.taken = numbers(size, depth + 1)
        self.accepted = numbers(size)

    def turn_to(self, sequences: list[Sequence], idle: int) -> None:
        """Take the sequences' pages. That is all that lanes must be told of sequences which go on where they are.

        Lanes that have no sequence begin again: they have a single page to run along.
        """
        self.slots[len(sequences) :] = 0
        self.accepted[len(sequences) :] = 0
        tables = np.full(self.tables.shape, idle, dtype=np.int32)
        for table, sequence in zip(tables, sequences, strict=False):
            table[: len(sequence.table.pages)] = sequence.table.pages
        if not np.array_equal(tables, self._pages):
            self._pages = tables
            self.tables.copy_(torch.from_numpy(tables))

    def fill(self, sequences: list[Sequence], known: list[int], idle: int) -> None:
        """Set the lanes up for sequences whose slots are reserved.

        `known`: how many tokens of each are to be taken as known, all but the last few. `idle`: a page for the lanes
        that have no sequence.
        """
        self.turn_to(sequences, idle)
        spare = self.size - len(sequences)
        slots = [s.cached for s in sequences] + [0] * spare
        taken = np.zeros((self.size, self.taken.shape[1]), dtype=np.int64)
        for line, sequence, start in zip(taken, sequences, known, strict=False):
            line[: len(sequence.tokens) - start] = sequence.tokens[start:]
        accepted = [len(s.tokens) - 1 - start for s, start in zip(sequences, known, strict=True)] + [0] * spare
        self.slots.copy_(torch.tensor(slots))
        self.taken.copy_(torch.from_numpy(taken))
        self.accepted.copy_(torch.tensor(accepted))
        self.tokens[:, 0].copy_(torch.tensor([s.tokens[-1] for s in sequences] + [0] * spare))
        self.stems.copy_(noise.halves([s.sampler.stem for s in sequences] + [0] * spare))
        self.temperatures.copy_(torch.tensor([s.params.temperature for s in sequences] + [0.0] * spare))
        each = len(self.offsets)
        self.row_stems.copy_(self.stems.repeat_interleave(each, 1))
        self.row_temperatures.copy_(self.temperatures.repeat_interleave(each))

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
            lines = self._lines
        start = first[lines]
        slots, positions = start + offsets, (start + depths).clamp(0, self.highest)
        pages = self.tables[lines, slots.clamp_min(0) // PAGE_SIZE].long()
        return LaneRows(positions.flatten(), self.highest, pages.flatten(), slots.flatten() % PAGE_SIZE)

    def advance(
        self,
        chosen: torch.Tensor,
        path: torch.Tensor,
        accepted: torch.Tensor,
        depths: torch.Tensor,
        told: torch.Tensor,
        number: torch.Tensor,
    ) -> None:
        """Take the accepted path [lanes, depth], and as the new root the target's choice behind it.

        `chosen` [lanes, 1 + nodes]: the target's choices behind all nodes; `accepted` [lanes]: the length of the path;
        `depths` [lanes, 1 + nodes]: of the nodes. All of it is written down in line `number` [1] of `told` [rounds,
        lanes, 2 + depth + 1]: how many were accepted, the deepest node, and what was taken.
        """
        if runs_fused(chosen):
            from slipstream.lane_kernels import advance

            advance(chosen, path, accepted, depths, self.tokens, self.taken, self.accepted, self.slots, told, number)
            return
        self.taken.copy_(chosen.gather(1, torch.nn.functional.pad(path, (1, 0))))  # each is what its parent chose
        self.accepted.copy_(accepted)
        self.tokens[:, 0].copy_(self.taken.gather(1, accepted[:, None])[:, 0])
        self.slots += accepted + 1
        line = torch.cat([accepted[:, None], depths.amax(1, keepdim=True), self.taken], 1)
        told.index_copy_(0, number, line[None])

    def move(self, data: torch.Tensor, path: torch.Tensor) -> None:
        """Make the rows of the accepted paths the next rows of their lanes; others stay where they are.

        `data` [layers, 2, pages, kv heads, PAGE_SIZE, size]: a store of keys and values; path [lanes, depth].
        """
        if runs_fused(path):
            from slipstream.lane_kernels import move

            move(data, self.tables, self.slots, path)
            return
        places = torch.arange(1, self.depth + 1, device=path.device).expand_as(path)
        rows, to = (self.rows(self.slots, nodes) for nodes in (torch.where(path > 0, path, places), places))
        data[:, :, to._pages, :, to._offsets] = data[:, :, rows._pages, :, rows._offsets]

    def keep(self, data: torch.Tensor, taps: Seq[torch.Tensor], path: torch.Tensor) -> None:
        """Write the hidden states of the roots and of the accepted paths behind them where they will be read.

        `data` [pages, PAGE_SIZE, width of all taps]; taps [lanes * (1 + nodes), width] each. What is written behind a
        path's end is no good, and is written again before anybody reads it.
        """
        if runs_fused(path):
            from slipstream.lane_kernels import keep

            keep(data, taps, self.tables, self.slots, path)
            return
        chosen = path_rows(path, self.nodes).flatten()
        rows = self.rows(self.slots, torch.arange(self.depth + 1, device=path.device))
        data[rows._pages, rows._offsets] = torch.cat([tap[chosen] for tap in taps], 1).to(data.dtype)

    def before_fresh(self, data: torch.Tensor) -> torch.Tensor:
        """What is kept of the row before each of the tokens that came last, [lanes * (depth + 1), width].

        `data` [pages, PAGE_SIZE, width]. Before the first token of a text there are zeros.
        """
        if runs_fused(data):
            from slipstream.lane_kernels import before_fresh

            return before_fresh(data, self.tables, self.slots, self.accepted, self.depth + 1)
        first = self.slots - self.accepted - 1
        fresh = torch.arange(self.depth + 1, device=data.device)
        rows = self.rows(first, fresh)
        known = (first[:, None] + fresh).flatten() >= 0
        return torch.where(known[:, None], data[rows._pages, rows._offsets], 0.0)


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


def path_rows(path: torch.Tensor, nodes: int) -> torch.Tensor:
    """The rows of a pass that the roots and the paths below them had, [lanes, 1 + depth]; 1 + `nodes` rows a lane."""
    first = torch.arange(len(path), device=path.device)[:, None] * (1 + nodes)
    return first + torch.nn.functional.pad(path, (1, 0))
