"""Lanes: the state of a batch on the device while it runs without the host, one lane per sequence.

A round verifies every lane's root and the tree below it, and advances the lane to the end of the accepted path. All
tensors have fixed addresses, so that a round can be captured and replayed.

Branches for tensors that are not on a GPU are the reference of the kernels: only tests run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch

from slipstream.cache import PAGE_SIZE, LayerStore
from slipstream.gpu.device_sampling import RowCuts
from slipstream.gpu.fused import runs_fused
from slipstream.sequence import Sequence


class Lanes:
    """The buffers of a batch, padded with idle lanes to one of a few sizes."""

    def __init__(self, size: int, nodes: int, depth: int, longest: int, spare: int, device: str) -> None:
        """Trees of `nodes` nodes below the root, in `depth` levels. `longest`: tokens of a sequence at most; `spare`:
        rows that may be written after the last of them.
        """
        self.size = size
        self.nodes = nodes
        self.depth = depth
        self.highest = longest - 1  # positions are clamped to it; rows after the last one are never kept
        self.device = device

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        pages = -(-(longest + spare) // PAGE_SIZE)
        self.tables = torch.zeros(size, pages, dtype=torch.int32, device=device)
        self._pages = np.zeros(self.tables.shape, dtype=np.int32)  # the host's copy of the tables
        self.slots = numbers(size)  # slots of the roots: the rows before them are committed
        self.stems = numbers(2, size)  # noise stems of the samplers
        self.temperatures = torch.zeros(size, dtype=torch.float32, device=device)
        # The same for the rows of the target pass.
        self.row_stems = numbers(2, size * (1 + nodes))
        self.row_temperatures = torch.zeros(size * (1 + nodes), dtype=torch.float32, device=device)
        self.row_cuts = RowCuts.neutral(size * (1 + nodes), device)
        self.offsets = torch.arange(1 + nodes, device=device)  # of those rows after the roots
        self._lines = torch.arange(size, device=device)[:, None]
        self.tokens = numbers(size, 1 + nodes)  # tokens of the trees, the roots first
        self.parents = numbers(size, 1 + nodes)
        self.scores = torch.zeros(size, 1 + nodes, dtype=torch.float32, device=device)  # logs of joint probabilities
        self.origins = numbers(size, 1 + nodes)  # index of the drafter of each node
        self.active = numbers(size)  # 1: the lane has a sequence
        # The last tokens, of which the root is the last, and how many of them come before it.
        self.last_tokens = numbers(size, depth + 1)
        self.accepted = numbers(size)

    def set_pages(self, sequences: Mapping[int, Sequence], idle: int) -> None:
        """Update the page tables, by lane. Sequences that continue where they are need no more than that.

        Lanes without a sequence restart: they have a single page, `idle`.
        """
        self.slots.mul_(self.active)
        self.accepted.mul_(self.active)
        tables = np.full(self.tables.shape, idle, dtype=np.int32)
        for lane, sequence in sequences.items():
            tables[lane, : len(sequence.table.pages)] = sequence.table.pages
        if not np.array_equal(tables, self._pages):
            self._pages = tables
            self.tables.copy_(torch.from_numpy(tables))

    def fill(self, sequences: Mapping[int, Sequence | None], known: Callable[[Sequence], int]) -> None:
        """Set lanes up for sequences whose slots are reserved; None empties a lane. The other lanes stay as they are.

        `known`: how many tokens of a sequence the drafter has processed, all but the last few.
        """
        numbers = np.zeros((len(sequences), 6 + self.last_tokens.shape[1]), dtype=np.int64)
        for line, sequence in zip(numbers, sequences.values(), strict=True):
            if sequence is not None:
                start, stem = known(sequence), sequence.sampler.stem
                accepted, last = len(sequence.tokens) - 1 - start, sequence.tokens[start:]
                line[:6] = 1, sequence.cached, accepted, last[-1], stem & 0xFFFFFFFF, stem >> 32
                line[6 : 6 + len(last)] = last
        which = torch.tensor(list(sequences), device=self.device)
        active, slots, accepted_, roots, low, high, *last_tokens = torch.from_numpy(numbers.T).to(self.device)
        self.active[which], self.slots[which], self.accepted[which] = active, slots, accepted_
        self.tokens[which, 0] = roots
        self.last_tokens[which] = torch.stack(last_tokens, 1)
        self.stems[:, which] = torch.stack([low, high])
        params = [None if sequence is None else sequence.params for sequence in sequences.values()]
        temperatures = torch.tensor([0.0 if p is None else p.temperature for p in params], dtype=torch.float32)
        self.temperatures[which] = temperatures.to(self.device)
        self.row_stems.view(2, self.size, -1)[:, which] = self.stems[:, which, None]
        self.row_temperatures.view(self.size, -1)[which] = self.temperatures[which, None]
        for rows, values in zip(self.row_cuts, RowCuts.of(params).to(self.device), strict=True):
            rows.view(self.size, -1)[which] = values[:, None]

    def rows(self, first: torch.Tensor, offsets: torch.Tensor, depths: torch.Tensor | None = None) -> LaneRows:
        """Rows of every lane: slots and positions `offsets` [rows] after `first` [lanes].

        `depths`, [lanes, rows] or [rows]: the offsets of the positions, if they differ from those of the slots.
        """
        return self._place_rows(first, offsets, offsets if depths is None else depths)

    def rows_after_roots(self, lines: torch.Tensor, offsets: torch.Tensor, depths: torch.Tensor) -> LaneRows:
        """Rows after the roots, in any order, [rows] each: `lines` has the lane of each row."""
        return self._place_rows(self.slots, offsets, depths, lines)

    def _place_rows(
        self, first: torch.Tensor, offsets: torch.Tensor, depths: torch.Tensor, lines: torch.Tensor | None = None
    ) -> LaneRows:
        if runs_fused(first):
            from slipstream.gpu.kernels.lane_kernels import place_rows

            placed = place_rows(first, self.tables, offsets, depths, lines, self.highest, PAGE_SIZE)
            return LaneRows(placed[0], self.highest, *placed[1:])
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
        results: torch.Tensor,
        number: torch.Tensor,
    ) -> None:
        """Accept the path [lanes, depth], and make the target's choice after it the new root.

        `chosen` [lanes, 1 + nodes]: the target's choices after all nodes; `accepted` [lanes]: the length of the path;
        `depths` [lanes, 1 + nodes]: of the nodes. Writes line `number` [1] of `results` [rounds, lanes, 2 + depth + 1
        or more]: the number of accepted nodes, the deepest node, and the new tokens.
        """
        if runs_fused(chosen):
            from slipstream.gpu.kernels.lane_kernels import advance

            advance(
                chosen,
                path,
                accepted,
                depths,
                self.tokens,
                self.last_tokens,
                self.accepted,
                self.slots,
                results,
                number,
            )
            return
        self.last_tokens.copy_(chosen.gather(1, torch.nn.functional.pad(path, (1, 0))))  # each is its parent's choice
        self.accepted.copy_(accepted)
        self.tokens[:, 0].copy_(self.last_tokens.gather(1, accepted[:, None])[:, 0])
        self.slots += accepted + 1
        line = torch.cat([accepted[:, None], depths.amax(1, keepdim=True), self.last_tokens], 1)
        results[:, :, : line.shape[1]].index_copy_(0, number, line[None])

    def move(self, data: torch.Tensor, path: torch.Tensor) -> None:
        """Move the K/V rows of the accepted paths to the next rows of their lanes.

        `data` [layers, 2, pages, kv heads, PAGE_SIZE, size]: a store of keys and values; path [lanes, depth].
        """
        if runs_fused(path):
            from slipstream.gpu.kernels.lane_kernels import move

            move(data, self.tables, self.slots, path)
            return
        places = torch.arange(1, self.depth + 1, device=path.device).expand_as(path)
        rows, to = (self.rows(self.slots, nodes) for nodes in (torch.where(path > 0, path, places), places))
        data[:, :, to._pages, :, to._offsets] = data[:, :, rows._pages, :, rows._offsets]

    def store_features(self, data: torch.Tensor, taps: Seq[torch.Tensor], path: torch.Tensor) -> None:
        """Store the hidden states of the roots and of the accepted paths as features.

        `data` [pages, PAGE_SIZE, width of all taps]; taps [lanes * (1 + nodes), width] each. Rows after the end of a
        path are invalid, and are written again before they are read.
        """
        if runs_fused(path):
            from slipstream.gpu.kernels.lane_kernels import store_features

            store_features(data, taps, self.tables, self.slots, path)
            return
        chosen = path_rows(path, self.nodes).flatten()
        rows = self.rows(self.slots, torch.arange(self.depth + 1, device=path.device))
        data[rows._pages, rows._offsets] = torch.cat([tap[chosen] for tap in taps], 1).to(data.dtype)

    def features_before(self, data: torch.Tensor) -> torch.Tensor:
        """The features of the row before each of the last tokens, [lanes * (depth + 1), width].

        `data` [pages, PAGE_SIZE, width]. Zeros before the first token of a sequence.
        """
        if runs_fused(data):
            from slipstream.gpu.kernels.lane_kernels import features_before

            return features_before(data, self.tables, self.slots, self.accepted, self.depth + 1)
        first = self.slots - self.accepted - 1
        fresh = torch.arange(self.depth + 1, device=data.device)
        rows = self.rows(first, fresh)
        known = (first[:, None] + fresh).flatten() >= 0
        return torch.where(known[:, None], data[rows._pages, rows._offsets], 0.0)


class LaneRows:
    """The rows of one pass, [rows] each: the same number for every lane."""

    def __init__(self, positions: torch.Tensor, highest: int, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        self.positions = positions
        self.highest = highest
        self._pages = pages
        self._offsets = offsets
        self.places = (pages, offsets) if pages.is_cuda else None

    def split(self, sizes: Seq[int]) -> list[LaneRows]:
        """Consecutive parts of these sizes."""
        parts = zip(*(part.split(sizes) for part in (self.positions, self._pages, self._offsets)), strict=True)
        return [LaneRows(positions, self.highest, pages, offsets) for positions, pages, offsets in parts]

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Write k and v [2, kv heads, rows, size] to one layer."""
        layer.both[:, self._pages, :, self._offsets] = kv.permute(2, 0, 1, 3)


def path_rows(path: torch.Tensor, nodes: int) -> torch.Tensor:
    """The rows of the roots and of the paths in a pass, [lanes, 1 + depth]; 1 + `nodes` rows per lane."""
    first = torch.arange(len(path), device=path.device)[:, None] * (1 + nodes)
    return first + torch.nn.functional.pad(path, (1, 0))
