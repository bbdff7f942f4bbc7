"""Pages and stores: the K/V cache and the drafters' features of all sequences.

A sequence has one page table. Slot s of the sequence is row s % page_size of its page s // page_size, in every store:
the target's K/V, a draft model's K/V and a head's features are stores under the same table, shared and freed with it.

A step reserves slots for all the rows it will write, writes them (a tree's nodes follow the committed rows in index
order), and commits the accepted path: those rows become the next rows of the sequence, the rest is free again.
Only full, committed pages are shared between sequences, so no sequence writes a row that another one reads.

Every operation is atomic, whatever is raised in the middle (an interrupt, an out-of-memory error): the live tables say
which pages are in use, and all other bookkeeping can be rebuilt from them.
"""

from __future__ import annotations

import heapq
import math
import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import numpy as np
import torch

from slipstream.errors import CacheFull

PAGE_SIZE = 128  # also the block over which exact attention reduces: see attention/blocks.py

PrefixKey = tuple[int, tuple[int, ...]]  # (serial of the page before, this page's tokens): exact, no hash collisions


@dataclass(eq=False)
class PageTable:
    """One sequence's pages. `lengths[store]`: rows of that store that are committed."""

    pages: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    serials: list[int] = field(default_factory=list)  # of the leading pages that are in the prefix index
    marked: dict[str, int] = field(default_factory=dict)  # leading pages of each store that are marked as filled
    needs: tuple[str, ...] = ()  # stores in which a page found in the cache must have rows

    @property
    def slots(self) -> int:
        """How many rows the pages can hold."""
        return len(self.pages) * PAGE_SIZE

    def clear(self) -> None:
        """Become empty."""
        self.become(PageTable())

    def become(self, other: PageTable) -> None:
        """Take over the contents of another table."""
        self.pages, self.lengths, self.serials, self.marked = other.pages, other.lengths, other.serials, other.marked


@dataclass(frozen=True)
class SavedPages:
    """A preempted sequence: a copy of all its pages, in every store."""

    rows: dict[str, torch.Tensor]
    lengths: dict[str, int]
    count: int
    needs: tuple[str, ...] = ()


class LayerStore:
    """K and V of one layer, with cached views of them.

    Making a view costs as much as a small computation, and a step of a single sequence would make five per layer.
    """

    _MOST_VIEWS = 4096

    def __init__(self, both: torch.Tensor) -> None:
        self.both = both  # [2, pages, kv heads, PAGE_SIZE, size]
        self.keys, self.values = both[0], both[1]
        self._pages: dict[int, torch.Tensor] = {}
        self._heads: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._line: tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = (0, 0), (both, both)
        self._single: tuple[int, Sequence[torch.Tensor]] = (-1, ())  # the rows of one page, one view each

    def page(self, number: int) -> torch.Tensor:
        """K and V of one page, [2, kv heads, PAGE_SIZE, size]."""
        if number not in self._pages:
            self._pages[number] = self.both.select(1, number)
        return self._pages[number]

    def rows(self, page: int, first: int, count: int) -> torch.Tensor:
        """K and V of some rows of a page, [2, kv heads, count, size]."""
        if count > 1:
            return self.page(page).narrow(2, first, count)
        if self._single[0] != page:  # a single sequence writes them one after the other
            self._single = page, self.page(page).split(1, 2)
        return self._single[1][first]

    def line(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous pages as a batch of blocks: K transposed [pages * kv heads, size, PAGE], V [..., PAGE, size]."""
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

    On a CPU the memory is not resident until it is written (torch.zeros would write it), so that an unused part of the
    cache costs nothing. numpy's zeros would use huge pages: the first token of a sequence, which writes one row in
    every layer, would wait for 2 MiB of zeros each time.
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
        self.idle_page = pages  # one extra page that no sequence owns: rows that are not needed may be written there
        self.device = device
        self.stores: dict[str, torch.Tensor] = {}
        self._layers: dict[str, list[LayerStore]] = {}
        self._free = list(range(pages))  # a heap: low pages first, so that a single sequence gets contiguous pages
        self._users = [0] * pages
        self._index: dict[PrefixKey, int] = {}  # full committed pages by their content
        self._key_of: dict[int, PrefixKey] = {}
        self._serial_of: dict[int, int] = {}
        self._filled: dict[int, set[str]] = {}  # indexed page -> stores whose rows in it are all committed
        self._idle: OrderedDict[int, None] = OrderedDict()  # indexed pages without a user, oldest first
        self._next_serial = 1
        self._tables: WeakSet[PageTable] = WeakSet()  # all that have pages

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
        """Remove a store, and forget which pages have its rows."""
        for filled in self._filled.values():
            filled.discard(name)
        self._layers.pop(name, None)
        del self.stores[name]

    # -- allocating and freeing pages ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that can be allocated right now."""
        return len(self._free) + len(self._idle)

    def open(self, tokens: Sequence[int], needs: Sequence[str] = ()) -> PageTable:
        """A table for a sequence that begins with `tokens`, with every full page of them that is cached.

        The last token is never taken from the cache: its logits must be computed. `needs`: stores without whose rows a
        page is useless, because only the pass that computes its K/V can write them.
        """
        table = PageTable(needs=tuple(needs))
        with self._atomic(table):
            self._open(table, tokens)
            return table

    def _open(self, table: PageTable, tokens: Sequence[int]) -> None:
        self._tables.add(table)
        serial = 0
        for start in range(0, len(tokens) - PAGE_SIZE, PAGE_SIZE):
            page = self._index.get((serial, tuple(tokens[start : start + PAGE_SIZE])))
            if page is None or not self._filled[page].issuperset(table.needs):
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

    def reserve(self, table: PageTable, rows: int) -> None:
        """Make sure that the table can hold `rows` rows; all or nothing."""
        missing = -(-rows // PAGE_SIZE) - len(table.pages)
        self._require(missing)
        if missing <= 0:
            return
        before = replace(table, pages=list(table.pages))
        with self._atomic(table, before):
            self._tables.add(table)
            for _ in range(missing):
                table.pages.append(self._allocate())

    def _require(self, pages: int) -> None:
        if pages > self.available:
            raise CacheFull(f"{pages} pages are needed and {self.available} of {self.capacity} are free")

    def trim(self, table: PageTable, rows: int) -> None:
        """Free pages that hold no row below `rows`."""
        with self._atomic():
            while len(table.pages) > -(-rows // PAGE_SIZE):
                self._release_page(table.pages.pop())

    def release(self, table: PageTable) -> None:
        """Free all pages, even if interrupted. Shared pages can be found until they are evicted."""
        with self._atomic(table):
            for page in reversed(table.pages):
                self._release_page(page)
            table.clear()

    def _allocate(self) -> int:
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

    def _release_page(self, page: int) -> None:
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
        """Remove all pages without a user from the prefix index."""
        with self._atomic():
            while self._idle:
                page, _ = self._idle.popitem()
                self._forget(page)
                heapq.heappush(self._free, page)

    @contextmanager
    def _atomic(self, table: PageTable | None = None, before: PageTable | None = None) -> Iterator[None]:
        """If the body is interrupted: restore `table` to `before`, or empty it, and rebuild the bookkeeping."""
        try:
            yield
        except BaseException:
            if table is not None:
                table.become(before or PageTable())
            self._rebuild()
            raise

    def _rebuild(self) -> None:
        """Rebuild users, free, idle and indexed pages from the live tables."""
        users = [0] * self.capacity
        for table in self._tables:
            for page in table.pages:
                users[page] += 1
        known = [page for page, key in self._key_of.items() if self._index.get(key) == page]
        self._key_of = {page: self._key_of[page] for page in known}
        self._index = {key: page for page, key in self._key_of.items()}
        self._serial_of = {page: self._serial_of[page] for page in known}
        self._filled = {page: self._filled[page] for page in known}
        old_and_new = (page for page in (*self._idle, *known) if page in self._key_of and not users[page])
        self._idle = OrderedDict.fromkeys(old_and_new)
        self._free = [page for page in range(self.capacity) if not users[page] and page not in self._key_of]
        self._users = users

    # -- rows ---------------------------------------------------------------------------------------------------------

    def commit(self, table: PageTable, store: str, start: int, slots: Sequence[int]) -> None:
        """Make the rows at `slots` the rows start, start + 1, ... of the sequence; later rows are free again.

        `slots` ascends and slots[i] >= start + i, as for a path through a tree whose nodes are in index order.
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
        """Drop committed rows of a drafter's store, after its guesses were rejected."""
        table.lengths[store] = min(table.lengths[store], length)

    def publish(self, table: PageTable, store: str, tokens: Sequence[int]) -> None:
        """Index this sequence's full, committed pages by their tokens: `open` finds them. `store` is the target's.

        A sequence that ended inside an accepted run has more committed rows than `tokens`; those pages stay private.
        """
        for number in range(len(table.serials), min(table.lengths[store], len(tokens)) // PAGE_SIZE):
            page = table.pages[number]
            before = table.serials[-1] if table.serials else 0
            key = (before, tuple(tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]))
            # The page may be indexed under another key already: an equal page before it has another serial.
            known = self._index.get(key, page if page in self._key_of else None)
            if known is None:
                with self._atomic():
                    self._serial_of[page] = self._next_serial
                    self._next_serial += 1
                    self._filled[page] = set()
                    self._key_of[page] = key
                    self._index[key] = page
                known = page
            elif page not in self._key_of and self._lacks(known, table, number):
                known = self._replace(known, page)
            table.serials.append(self._serial_of[known])
        for name, length in table.lengths.items():
            full = length // PAGE_SIZE
            for page in table.pages[table.marked.get(name, 0) : full]:
                if page in self._filled:
                    self._filled[page].add(name)
            table.marked[name] = full

    def _lacks(self, known: int, table: PageTable, number: int) -> bool:
        """Whether a page lacks rows that the table needs and has itself, in its page of this number."""
        lacking = set(table.needs) - self._filled[known]
        return bool(lacking) and all(table.lengths[name] >= (number + 1) * PAGE_SIZE for name in lacking)

    def _replace(self, known: int, twin: int) -> int:
        """Index `twin` in place of `known`, which holds the same tokens; the pages after it stay indexed."""
        key, serial = self._key_of[known], self._serial_of[known]
        with self._atomic():
            self._forget(known)
            if known in self._idle:
                del self._idle[known]
                heapq.heappush(self._free, known)
            self._index[key], self._key_of[twin], self._serial_of[twin], self._filled[twin] = twin, key, serial, set()
        return twin

    # -- whole sequences ----------------------------------------------------------------------------------------------

    def fork(self, table: PageTable, rows: int) -> PageTable:
        """A second sequence that begins with the first `rows` rows: full pages shared, the partial one copied."""
        full = rows // PAGE_SIZE
        if rows % PAGE_SIZE and self.available == 0:
            raise CacheFull("no page is free for the copy of a partial page")
        twin = PageTable(serials=table.serials[:full], needs=table.needs)
        twin.lengths = {name: min(length, rows) for name, length in table.lengths.items()}
        with self._atomic(twin):
            self._tables.add(twin)
            for page in table.pages[:full]:
                self._use(page)
                twin.pages.append(page)
            if rows % PAGE_SIZE:
                copy = self._allocate()
                twin.pages.append(copy)
                for data in self.stores.values():
                    data[:, :, copy] = data[:, :, table.pages[full]]
            return twin

    def save(self, table: PageTable) -> SavedPages:
        """Copy a sequence out of the cache and release its pages."""
        index = torch.tensor(table.pages, dtype=torch.int64, device=self.device)
        rows = {name: data.index_select(2, index) for name, data in self.stores.items()}
        before = replace(table)
        with self._atomic(table, before):
            self.release(table)
            return SavedPages(rows, before.lengths, len(before.pages), before.needs)

    def restore(self, saved: SavedPages) -> PageTable:
        """Restore a saved sequence, bit for bit, in pages of its own."""
        self._require(saved.count)
        table = PageTable(lengths=dict(saved.lengths), needs=saved.needs)
        with self._atomic(table):
            self.reserve(table, saved.count * PAGE_SIZE)
            index = torch.tensor(table.pages, dtype=torch.int64, device=self.device)
            for name in self.stores.keys() & saved.rows.keys():  # others were removed since
                self.stores[name].index_copy_(2, index, saved.rows[name])
            return table
