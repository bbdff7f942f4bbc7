"""Hidden states of the target, a row per token, kept for a head under the sequence's page table."""

from __future__ import annotations

import torch

from slipstream.cache import PAGE_SIZE, PagedCache, PageTable
from slipstream.drafters.base import Outcome


class FeatureStore:
    """What a head reads of the tokens before the root: the tapped layers' rows, side by side.

    Rows are only appended, as the target commits them. Where a prefix was found in the cache but its hidden states were
    not (its request went on without drafts), the rows are zeros: the head guesses worse behind them, and that is all.
    """

    def __init__(self, cache: PagedCache, name: str, taps: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
        self.name = name
        self._taps = taps
        self._cache = cache
        self.data = cache.add_store(name, 1, 1, 1, len(taps) * width, dtype)[0, 0, :, 0]  # [pages, PAGE_SIZE, width]

    def append(self, outcome: Outcome) -> None:
        """Keep the rows that the last pass committed."""
        table = outcome.sequence.table
        rows = torch.cat([outcome.taps[layer] for layer in self._taps], dim=1)
        stop = outcome.sequence.cached
        start, known = stop - len(rows), self.length(table)
        if known < start:
            self.write(table, known, rows.new_zeros(start - known, rows.shape[1]))
        self.write(table, start, rows)

    def length(self, table: PageTable) -> int:
        """How many tokens' rows there are."""
        return table.lengths.get(self.name, 0)

    def read(self, table: PageTable, start: int, stop: int) -> torch.Tensor:
        """Rows [stop - start, taps * width]; before the first token there are zeros."""
        rows = self.data[*self._places(table, max(0, start), stop)]
        return rows if start >= 0 else torch.cat([rows.new_zeros(-start, rows.shape[1]), rows])

    def write(self, table: PageTable, start: int, rows: torch.Tensor) -> None:
        """Keep rows [count, taps * width] of the tokens from `start` on; none are known behind them."""
        stop = start + len(rows)
        self.data[*self._places(table, start, stop)] = rows.to(self.data.dtype)
        table.lengths[self.name] = stop

    def _places(self, table: PageTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = range(start, stop)
        device = self.data.device
        pages = torch.tensor([table.pages[slot // PAGE_SIZE] for slot in slots], dtype=torch.int64, device=device)
        return pages, torch.tensor([slot % PAGE_SIZE for slot in slots], dtype=torch.int64, device=device)
