"""Hidden states of the target, one row per token, stored for a head under the sequence's page table."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slipstream.cache import PAGE_SIZE, PagedCache, PageTable
from slipstream.drafters.base import Outcome
from slipstream.drafters.device.device_draft import DeviceKeeper
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence


class FeatureStore:
    """What a head reads of the tokens before the root: the tapped layers' rows, side by side.

    Rows are only appended, as the target commits them. A sequence that missed some (it ran without drafts for a while)
    gets no more: its rows end where the gap begins, and it drafts nothing from there on.
    """

    def __init__(self, cache: PagedCache, name: str, taps: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
        self.name = name
        self.taps = taps
        self._cache = cache
        self.data = cache.add_store(name, 1, 1, 1, len(taps) * width, dtype)[0, 0, :, 0]  # [pages, PAGE_SIZE, width]
        # In every step of a small model a few rows are copied: NumPy takes a fifth of the time that tensors take.
        self._array = self.data.numpy() if dtype == torch.float32 and not self.data.is_cuda else None

    def append(self, outcome: Outcome) -> None:
        """Keep the rows that the last pass committed."""
        table, stop = outcome.sequence.table, outcome.sequence.cached
        taps = [outcome.taps[layer] for layer in self.taps]
        start = stop - len(taps[0])
        if start > self.length(table):
            return
        page, first = divmod(start, PAGE_SIZE)
        if self._array is not None and first + stop - start <= PAGE_SIZE:
            array, width = self._array[table.pages[page], first : first + stop - start], taps[0].shape[1]
            for number, tap in enumerate(taps):
                array[:, number * width : (number + 1) * width] = tap.numpy()
            table.lengths[self.name] = stop
        elif first + stop - start <= PAGE_SIZE:  # as in nearly every step: plain copies, without a tensor in between
            columns = self.data[table.pages[page], first : first + stop - start].split(taps[0].shape[1], 1)
            for column, rows in zip(columns, taps, strict=True):
                column.copy_(rows)
            table.lengths[self.name] = stop
        else:
            self.write(table, start, torch.cat(taps, dim=1))

    def length(self, table: PageTable) -> int:
        """Number of tokens with rows."""
        return table.lengths.get(self.name, 0)

    def follows(self, sequence: Sequence) -> bool:
        """Whether all tokens before the root have rows."""
        return self.length(sequence.table) >= len(sequence.tokens) - 1

    def read(self, table: PageTable, start: int, stop: int) -> torch.Tensor:
        """Rows [stop - start, taps * width], perhaps a view; zeros before the first token."""
        page, first = divmod(start, PAGE_SIZE)
        if start >= 0 and first + stop - start <= PAGE_SIZE:
            return self.data[table.pages[page], first : first + stop - start]
        rows = self.data[*self._places(table, max(0, start), stop)]
        return rows if start >= 0 else torch.cat([rows.new_zeros(-start, rows.shape[1]), rows])

    def write(self, table: PageTable, start: int, rows: torch.Tensor) -> None:
        """Write rows [count, taps * width] of the tokens from `start` on; they become the last rows."""
        stop = start + len(rows)
        self.data[*self._places(table, start, stop)] = rows.to(self.data.dtype)
        table.lengths[self.name] = stop

    def _places(self, table: PageTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = range(start, stop)
        device = self.data.device
        pages = torch.tensor([table.pages[slot // PAGE_SIZE] for slot in slots], dtype=torch.int64, device=device)
        return pages, torch.tensor([slot % PAGE_SIZE for slot in slots], dtype=torch.int64, device=device)


def within_range(fused: torch.Tensor) -> torch.Tensor:
    """Fused hidden states without infinities: in float16 those of the first token of a text exceed the range.

    Half the range is left for what a layer adds.
    """
    return fused.clamp_(-32_000.0, 32_000.0) if fused.dtype == torch.float16 else fused


class FeatureKeeper(DeviceKeeper):
    """Stores the rows of the tokens of rounds, so that a head that does not draft in them misses none."""

    def __init__(self, store: FeatureStore, lanes: Lanes) -> None:
        self._store = store
        self._lanes = lanes

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        """All state is in the pages."""

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        self._lanes.store_features(self._store.data, [taps[layer] for layer in self._store.taps], path)

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        sequence.table.lengths[self._store.name] = sequence.cached
