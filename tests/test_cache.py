"""The paged cache against a model that is nothing but lists.

Every row that is written carries the number of the token prefix it belongs to (that is what keys and values are: a
function of the prefix), and rows of refused nodes carry rubbish. Whatever is reserved, committed, forked, shared, set
aside and brought back, every sequence must read its own prefixes, and no page may be lost or have two owners.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from slipstream import cache as cache_module
from slipstream.cache import PagedCache, PageTable, SavedPages
from slipstream.errors import CacheFull

SIZE = 4  # rows a page: small, so that a few steps cross many boundaries
CAPACITY = 10
STORES = ("target", "draft")
LAYERS, PARTS, HEADS, WIDTH = 2, 2, 1, 2


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(cache_module, "PAGE_SIZE", SIZE)
    yield
    patch.undo()


def make_cache(pages: int = CAPACITY) -> PagedCache:
    cache = PagedCache(pages)
    for name in STORES:
        cache.add_store(name, LAYERS, PARTS, HEADS, WIDTH, torch.int64)
    return cache


class Numbers:
    """A number for every prefix, and a fresh one for every piece of rubbish."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}
        self._rubbish = itertools.count(-1, -1)

    def of(self, tokens: list[int], row: int) -> int:
        return self._known.setdefault(tuple(tokens[: row + 1]), len(self._known) + 1)

    def rubbish(self) -> int:
        return next(self._rubbish)


def write(cache: PagedCache, table: PageTable, store: str, slot: int, number: int) -> None:
    """A row whose every part differs, so that swapped layers, parts or columns would show."""
    pattern = torch.arange(LAYERS * PARTS * HEADS * WIDTH).view(LAYERS, PARTS, HEADS, WIDTH)
    cache.stores[store][:, :, table.pages[slot // SIZE], :, slot % SIZE] = number * 100 + pattern


def read(cache: PagedCache, table: PageTable, store: str) -> list[int]:
    """The numbers of a sequence's committed rows."""
    numbers = []
    pattern = torch.arange(LAYERS * PARTS * HEADS * WIDTH).view(LAYERS, PARTS, HEADS, WIDTH)
    for slot in range(table.lengths[store]):
        row = cache.stores[store][:, :, table.pages[slot // SIZE], :, slot % SIZE] - pattern
        assert len(set(row.flatten().tolist())) == 1, "a row was torn"
        numbers.append(int(row[0, 0, 0, 0]) // 100)
    return numbers


@dataclass(eq=False)
class Owner:
    """A sequence as the model sees it: its tokens are the target's committed rows; the draft may lag behind."""

    table: PageTable
    tokens: list[int]
    draft: int


@dataclass(eq=False)
class Aside:
    saved: SavedPages
    tokens: list[int]
    draft: int


tokens_lists = st.lists(st.integers(0, 1), max_size=3 * SIZE)


class CacheMachine(RuleBasedStateMachine):
    owners = Bundle("owners")
    asides = Bundle("asides")

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.numbers = Numbers()
        self.live: list[Owner] = []

    def _adopt(self, owner: Owner) -> Owner:
        self.live.append(owner)
        return owner

    @rule(target=owners, tokens=tokens_lists)
    def open_fresh(self, tokens: list[int]) -> Owner:
        return self._open(tokens)

    @rule(target=owners, like=owners, more=tokens_lists)
    def open_alike(self, like: Owner, more: list[int]) -> Owner:
        return self._open([*like.tokens, *more])

    def _open(self, tokens: list[int]) -> Owner:
        table = self.cache.open(tokens)
        found = table.lengths["target"]
        assert found % SIZE == 0 and found <= max(0, len(tokens) - 1)
        assert len(table.pages) * SIZE >= max(table.lengths.values())
        return self._adopt(Owner(table, tokens[:found], table.lengths["draft"]))

    @rule(owner=owners, tree=st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=7))
    def step(self, owner: Owner, tree: list[tuple[int, bool]]) -> None:
        """Write a row per node, keep those that were accepted, and share what is full."""
        start, before = len(owner.tokens), list(owner.table.pages)
        missing = -(-(start + len(tree)) // SIZE) - len(before)
        if missing > self.cache.available:
            with pytest.raises(CacheFull):
                self.cache.reserve(owner.table, start + len(tree))
            assert owner.table.pages == before, "all or nothing"
            return
        self.cache.reserve(owner.table, start + len(tree))
        slots = []
        for index, (token, accepted) in enumerate(tree):
            number = self.numbers.rubbish()
            if accepted:
                owner.tokens.append(token)
                slots.append(start + index)
                number = self.numbers.of(owner.tokens, len(owner.tokens) - 1)
            write(self.cache, owner.table, "target", start + index, number)
        self.cache.commit(owner.table, "target", start, slots)

    @rule(owner=owners, rows=st.integers(1, 6), scratch=st.integers(0, 3))
    def draft_catches_up(self, owner: Owner, rows: int, scratch: int) -> None:
        end = min(len(owner.tokens), owner.draft + rows)
        for row in range(owner.draft, end):
            write(self.cache, owner.table, "draft", row, self.numbers.of(owner.tokens, row))
        # Scratch rows lie behind the sequence, where nobody else reads.
        for slot in range(len(owner.tokens), min(len(owner.tokens) + scratch, owner.table.slots)):
            write(self.cache, owner.table, "draft", slot, self.numbers.rubbish())
        self.cache.commit(owner.table, "draft", owner.draft, range(owner.draft, end))
        owner.draft = end

    @rule(owner=owners, length=st.integers(0, 12))
    def truncate_draft(self, owner: Owner, length: int) -> None:
        self.cache.truncate(owner.table, "draft", length)
        owner.draft = min(owner.draft, length)

    @rule(owner=owners)
    def share(self, owner: Owner) -> None:
        self.cache.share(owner.table, "target", owner.tokens)

    @rule(owner=owners)
    def trim(self, owner: Owner) -> None:
        self.cache.trim(owner.table, len(owner.tokens))
        assert len(owner.table.pages) == -(-len(owner.tokens) // SIZE)

    @rule(target=owners, owner=owners, part=st.floats(0, 1))
    def fork(self, owner: Owner, part: float) -> Owner:
        rows = round(part * len(owner.tokens))
        if rows % SIZE and self.cache.available == 0:
            with pytest.raises(CacheFull):
                self.cache.fork(owner.table, rows)
            return multiple()
        twin = self.cache.fork(owner.table, rows)
        assert twin.pages[: rows // SIZE] == owner.table.pages[: rows // SIZE], "full pages are shared"
        if rows % SIZE:
            assert twin.pages[-1] not in owner.table.pages, "a partial page is copied"
        return self._adopt(Owner(twin, owner.tokens[:rows], min(rows, owner.draft)))

    @rule(target=asides, owner=consumes(owners))
    def save(self, owner: Owner) -> Aside:
        self.live.remove(owner)
        return Aside(self.cache.save(owner.table), owner.tokens, owner.draft)

    @rule(target=owners, aside=consumes(asides))
    def restore(self, aside: Aside) -> Owner:
        if aside.saved.count > self.cache.available:
            with pytest.raises(CacheFull):
                self.cache.restore(aside.saved)
            return multiple()
        return self._adopt(Owner(self.cache.restore(aside.saved), aside.tokens, aside.draft))

    @rule(owner=consumes(owners))
    def release(self, owner: Owner) -> None:
        self.live.remove(owner)
        self.cache.release(owner.table)

    @invariant()
    def everybody_reads_their_own_rows(self) -> None:
        for owner in self.live:
            lengths = {"target": len(owner.tokens), "draft": owner.draft}
            for store, length in lengths.items():
                assert owner.table.lengths[store] == length
                assert read(self.cache, owner.table, store) == [self.numbers.of(owner.tokens, i) for i in range(length)]

    @invariant()
    def no_page_is_lost_or_has_two_owners(self) -> None:
        cache = self.cache
        users = Counter(page for owner in self.live for page in owner.table.pages)
        assert cache._users == [users[page] for page in range(CAPACITY)]
        free, idle = list(cache._free), set(cache._idle)
        assert len(free) == len(set(free))
        assert set(free) | idle | set(users) == set(range(CAPACITY))
        assert len(free) + len(idle) + len(users) == CAPACITY, "a page is free and used at once"
        assert cache.available == CAPACITY - len(users)
        assert set(cache._index.values()) == set(cache._key_of) == set(cache._serial_of) == set(cache._filled)
        assert len(cache._index) == len(cache._key_of), "a forgotten key stays in the index"

    def teardown(self) -> None:
        for owner in self.live:
            self.cache.release(owner.table)
        assert self.cache.available == CAPACITY


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, derandomize=True, deadline=None)
