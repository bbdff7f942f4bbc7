"""Pages and stores: where keys, values and drafters' features of all sequences live.

A sequence has one page table. Slot s of the sequence is row s % page_size of its page s // page_size, in every store:
the target's K/V, a draft model's K/V and a head's features are stores under the same table, shared and freed with it.

A step reserves slots for all the rows it will write, writes them (a tree's nodes lie in index order behind the
committed rows), and commits the accepted path: those rows become the next rows of the sequence, the rest is free again.
Only full, committed pages are shared between sequences, so nobody ever writes a row that another one reads.
"""

from __future__ import annotations

import heapq
import math
import mmap
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.errors import CacheFull

PAGE_SIZE = 128  # also the block over which exact attention reduces: see attention/blocks.py

PrefixKey = tuple[int, tuple[int, ...]]  # (serial of the page before, this page's tokens): exact, no hash collisions


@dataclass
class PageTable:
    """One sequence's pages. `lengths[store]`: rows of that store that are committed."""

    pages: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    serials: list[int] = field(default_factory=list)  # of the leading pages that are known to the prefix index
    marked: dict[str, int] = field(default_factory=dict)  # leading pages of each store that the index has been told of

    @property
    def slots(self) -> int:
        """How many rows the pages can hold."""
        return len(self.pages) * PAGE_SIZE


@dataclass(frozen=True)
class SavedPages:
    """A sequence set aside: a copy of all its pages, in every store."""

    rows: dict[str, torch.Tensor]
    lengths: dict[str, int]
    count: int


class LayerStore:
    """K and V of one layer, and the views of it that every step needs again.

    A view costs as much time as a small computation, and a step of a lone answer would make five of them per layer.
    """

    _MOST_VIEWS = 4096

    def __init__(self, both: torch.Tensor) -> None:
        self.both = both  # [2, pages, kv heads, PAGE_SIZE, size]
        self.keys, self.values = both[0], both[1]
        self._pages: dict[int, torch.Tensor] = {}
        self._heads: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._line: tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = (0, 0), (both, both)
        self._single: tuple[int, Sequence[torch.Tensor]] = (-1, ())  # the rows of one page, each for itself

    def page(self, number: int) -> torch.Tensor:
        """K and V of one page, [2, kv heads, PAGE_SIZE, size]."""
        if number not in self._pages:
            self._pages[number] = self.both.select(1, number)
        return self._pages[number]

    def rows(self, page: int, first: int, count: int) -> torch.Tensor:
        """K and V of some rows of a page, [2, kv heads, count, size]."""
        if count > 1:
            return self.page(page).narrow(2, first, count)
        if self._single[0] != page:  # a lone answer writes them one after the other
            self._single = page, self.page(page).split(1, 2)
        return self._single[1][first]

    def line(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages in a line as a batch of blocks: K transposed [pages * kv heads, size, PAGE], V [..., PAGE, size]."""
        if self._line[0] != (first, count):
            keys, values = (rows.narrow(0, first, count).flatten(0, 1) for rows in (self.keys, self.values))
            self._line = (first, count), (keys.transpose(1, 2), values)
        return self._line[1]

    def head(self, page: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `columns` rows of a page: K transposed [kv heads, size, columns], V [kv heads, columns, size]."""
        views = self._heads.get((page, columns))
        if views is None:
            if len(self._heads) >= self._MOST_VIEWS:
                self._heads.clear()
            keys, values = self.page(page).narrow(2, 0, columns).unbind()
            views = self._heads[page, columns] = keys.transpose(1, 2), values
        return views


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, because unused rows must be finite: they are multiplied by a probability of exactly 0.

    On a CPU the memory is not resident until it is written (torch.zeros would write it), so that the size of the cache
    costs nothing until there is context to fill it. numpy's zeros would come in huge pages: the first token of an
    answer, which writes a line in every layer, would wait for 2 MiB of zeros each time.
    """
    size = math.prod(shape) * dtype.itemsize
    if device != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, **own), np.uint8)).view(dtype).view(shape)


class PagedCache:
    """All pages of one engine. A store is [layers, parts, pages + 1, heads, PAGE_SIZE, width]."""

    def __init__(self, pages: int, device: str = "cpu") -> None:
        self.capacity = pages
        self.idle_page = pages  # one more, which no sequence ever has: rows that nobody wants may be written there
        self.device = device
        self.stores: dict[str, torch.Tensor] = {}
        self._layers: dict[str, list[LayerStore]] = {}
        self._free = list(range(pages))  # a heap: low pages first, so that a lone sequence gets contiguous pages
        self._users = [0] * pages
        self._index: dict[PrefixKey, int] = {}  # full committed pages by what they hold
        self._key_of: dict[int, PrefixKey] = {}
        self._serial_of: dict[int, int] = {}
        self._filled: dict[int, set[str]] = {}  # indexed page -> stores whose rows in it are all committed
        self._idle: OrderedDict[int, None] = OrderedDict()  # indexed pages without a user, oldest first
        self._next_serial = 1

    def add_store(self, name: str, layers: int, parts: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a store; its rows are [heads, width], `layers` x `parts` of them per token."""
        shape = (layers, parts, self.capacity + 1, heads, PAGE_SIZE, width)
        self.stores[name] = _zeros(shape, dtype, self.device)
        return self.stores[name]

    def layers(self, name: str) -> list[LayerStore]:
        """A K/V store layer by layer."""
        if name not in self._layers:
            self._layers[name] = [LayerStore(both) for both in self.stores[name].unbind()]
        return self._layers[name]

    def remove_store(self, name: str) -> None:
        """Forget a store and every mark that says its rows are there."""
        del self.stores[name]
        self._layers.pop(name, None)
        for filled in self._filled.values():
            filled.discard(name)

    # -- taking and giving back pages ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that can be had right now."""
        return len(self._free) + len(self._idle)

    def open(self, tokens: Sequence[int]) -> PageTable:
        """A table for a sequence that begins with `tokens`, with every full page of them that is already here.

        The last token is never taken from the cache: somebody has to compute the logits that follow it.
        """
        table = PageTable()
        serial = 0
        for start in range(0, len(tokens) - PAGE_SIZE, PAGE_SIZE):
            page = self._index.get((serial, tuple(tokens[start : start + PAGE_SIZE])))
            if page is None:
                break
            self._use(page)
            serial = self._serial_of[page]
            table.pages.append(page)
            table.serials.append(serial)
        for name in self.stores:
            filled = 0
            while filled < len(table.pages) and name in self._filled[table.pages[filled]]:
                filled += 1
            table.lengths[name] = filled * PAGE_SIZE
        return table

    def reserve(self, table: PageTable, rows: int) -> None:
        """Make sure that the table can hold `rows` rows; all or nothing."""
        missing = -(-rows // PAGE_SIZE) - len(table.pages)
        if missing > self.available:
            raise CacheFull(f"{missing} pages are needed and {self.available} of {self.capacity} are free")
        for _ in range(missing):
            table.pages.append(self._take())

    def trim(self, table: PageTable, rows: int) -> None:
        """Give back pages that hold no row below `rows`."""
        while len(table.pages) > -(-rows // PAGE_SIZE):
            self._drop(table.pages.pop())

    def release(self, table: PageTable) -> None:
        """Give back everything. Shared pages stay findable until their room is needed."""
        for page in reversed(table.pages):
            self._drop(page)
        table.pages.clear()
        table.serials.clear()
        table.marked.clear()
        table.lengths.clear()

    def _take(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    def _use(self, page: int) -> None:
        self._idle.pop(page, None)
        self._users[page] += 1

    def _drop(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._key_of:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)

    def _forget(self, page: int) -> None:
        del self._index[self._key_of.pop(page)]
        del self._serial_of[page]
        del self._filled[page]

    def forget_idle(self) -> None:
        """Let nobody find the pages any more that have no user."""
        for page in self._idle:
            self._forget(page)
            heapq.heappush(self._free, page)
        self._idle.clear()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def commit(self, table: PageTable, store: str, start: int, slots: Sequence[int]) -> None:
        """Make the rows at `slots` the rows start, start + 1, ... of the sequence; later rows are free again.

        `slots` ascends and slots[i] >= start + i, as it is for a path through a tree whose nodes lie in index order.
        """
        moves = [(slot, start + i) for i, slot in enumerate(slots) if slot != start + i]
        if moves:
            data = self.stores[store]
            source, target = zip(*moves, strict=True)
            data[:, :, *self._place(table, target)] = data[:, :, *self._place(table, source)]
        table.lengths[store] = start + len(slots)

    def _place(self, table: PageTable, slots: Sequence[int]) -> tuple[torch.Tensor, slice, torch.Tensor]:
        pages = torch.tensor([table.pages[s // PAGE_SIZE] for s in slots], device=self.device)
        return pages, slice(None), torch.tensor([s % PAGE_SIZE for s in slots], device=self.device)

    def truncate(self, table: PageTable, store: str, length: int) -> None:
        """Take back committed rows of a drafter's store (its guesses were committed and then refused)."""
        table.lengths[store] = min(table.lengths[store], length)

    def share(self, table: PageTable, store: str, tokens: Sequence[int]) -> None:
        """Make the full, committed pages of this sequence findable by others. `store` is the target's.

        An answer that ended inside an accepted run has more committed rows than `tokens`; those pages stay private.
        """
        for number in range(len(table.serials), min(table.lengths[store], len(tokens)) // PAGE_SIZE):
            page = table.pages[number]
            before = table.serials[-1] if table.serials else 0
            key = (before, tuple(tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]))
            # A page can be known already under another key: a twin of the page before it has another serial.
            known = self._index.get(key, page if page in self._key_of else None)
            if known is None:
                self._index[key] = page
                self._key_of[page] = key
                self._serial_of[page] = self._next_serial
                self._filled[page] = set()
                self._next_serial += 1
                known = page
            table.serials.append(self._serial_of[known])
        for name, length in table.lengths.items():
            full = length // PAGE_SIZE
            for page in table.pages[table.marked.get(name, 0) : full]:
                if page in self._filled:
                    self._filled[page].add(name)
            table.marked[name] = full

    # -- whole sequences ----------------------------------------------------------------------------------------------

    def fork(self, table: PageTable, rows: int) -> PageTable:
        """A second sequence that begins with the first `rows` rows: full pages shared, the partial one copied."""
        full = rows // PAGE_SIZE
        twin = PageTable(serials=table.serials[:full])
        twin.lengths = {name: min(length, rows) for name, length in table.lengths.items()}
        if rows % PAGE_SIZE and self.available == 0:
            raise CacheFull("no page is free for the copy of a partial page")
        for page in table.pages[:full]:
            self._use(page)
            twin.pages.append(page)
        if rows % PAGE_SIZE:
            copy = self._take()
            twin.pages.append(copy)
            for data in self.stores.values():
                data[:, :, copy] = data[:, :, table.pages[full]]
        return twin

    def save(self, table: PageTable) -> SavedPages:
        """Copy a sequence out of the cache and release its pages."""
        index = torch.tensor(table.pages, dtype=torch.int64, device=self.device)
        rows = {name: data.index_select(2, index) for name, data in self.stores.items()}
        saved = SavedPages(rows, dict(table.lengths), len(table.pages))
        self.release(table)
        return saved

    def restore(self, saved: SavedPages) -> PageTable:
        """Bring a saved sequence back, bit for bit, in pages of its own."""
        table = PageTable(lengths=dict(saved.lengths))
        self.reserve(table, saved.count * PAGE_SIZE)
        index = torch.tensor(table.pages, dtype=torch.int64, device=self.device)
        for name, rows in saved.rows.items():
            self.stores[name].index_copy_(2, index, rows)
        return table
