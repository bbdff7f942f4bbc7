"""The paged cache against a model that is nothing but lists.

Every row that is written carries the number of the token prefix it belongs to (that is what keys and values are: a
function of the prefix), and rows of refused nodes carry rubbish. Whatever is reserved, committed, forked, shared, set
aside and brought back, every sequence must read its own prefixes, and no page may be lost or have two owners.
"""

from __future__ import annotations

import itertools
import mmap
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

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


PATTERN = torch.arange(LAYERS * PARTS * HEADS * WIDTH).view(LAYERS, PARTS, HEADS, WIDTH)


def write(cache: PagedCache, table: PageTable, store: str, slot: int, number: int) -> None:
    """A row whose every part differs, so that swapped layers, parts or columns would show."""
    cache.stores[store][:, :, table.pages[slot // SIZE], :, slot % SIZE] = number * 100 + PATTERN


def read(cache: PagedCache, table: PageTable, store: str) -> list[int]:
    """The numbers of a sequence's committed rows."""
    rows = cache.stores[store][:, :, table.pages].transpose(3, 4) - PATTERN[:, :, None, None]
    flat = rows.permute(2, 3, 0, 1, 4, 5).flatten(2).flatten(0, 1)[: table.lengths[store]]
    assert (flat == flat[:, :1]).all(), "a row was torn"
    return (flat[:, 0] // 100).tolist()


@dataclass(eq=False)
class Owner:
    """A sequence as the model sees it: its tokens are the target's committed rows; the draft may lag behind."""

    table: PageTable
    tokens: list[int]
    draft: int


class Model:
    """Does something at random, again and again, and says after each time what must be true."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = make_cache()
        self.numbers = Numbers()
        self.live: list[Owner] = []
        self.asides: list[tuple[SavedPages, Owner]] = []
        self.seen: Counter[str] = Counter()

    def act(self) -> None:
        if not self.live:
            return self.open()
        weights = {
            self.open: 3, self.step: 12, self.draft: 6, self.truncate: 1, self.publish: 6,
            self.trim: 2, self.fork: 2, self.save: 1, self.restore: 2, self.release: 3,
        }  # fmt: skip
        return self.random.choices(list(weights), list(weights.values()))[0]()

    def _tokens(self, most: int) -> list[int]:
        """Mostly the same token, so that sequences often have the same prefix."""
        return [int(self.random.random() < 0.08) for _ in range(self.random.randint(0, most))]

    def _one(self) -> Owner:
        return self.random.choice(self.live)

    def open(self) -> None:
        like = self._one().tokens if self.live and self.random.random() < 0.5 else []
        tokens = [*like, *self._tokens(3 * SIZE)]
        table = self.cache.open(tokens)
        found = table.lengths["target"]
        assert found % SIZE == 0 and found <= max(0, len(tokens) - 1)
        self.seen["prefix found"] += found > 0
        self.seen["prefix found without draft"] += found > table.lengths["draft"]
        self.live.append(Owner(table, tokens[:found], table.lengths["draft"]))

    def step(self) -> None:
        """Write a row per node and keep those that were accepted."""
        owner = self._one()
        tree = self._tokens(2 * SIZE)
        start, before = len(owner.tokens), list(owner.table.pages)
        if -(-(start + len(tree)) // SIZE) - len(before) > self.cache.available:
            with pytest.raises(CacheFull):
                self.cache.reserve(owner.table, start + len(tree))
            assert owner.table.pages == before, "all or nothing"
            self.seen["full"] += 1
            return
        self.cache.reserve(owner.table, start + len(tree))
        slots = []
        for slot, token in enumerate(tree, start):
            number = self.numbers.rubbish()
            if self.random.random() < 0.7:
                owner.tokens.append(token)
                slots.append(slot)
                number = self.numbers.of(owner.tokens, len(owner.tokens) - 1)
            write(self.cache, owner.table, "target", slot, number)
        self.cache.commit(owner.table, "target", start, slots)

    def draft(self) -> None:
        """The drafter catches up with some rows, and leaves scratch rows after the sequence."""
        owner = self._one()
        end = min(len(owner.tokens), owner.draft + self.random.randint(1, 8))
        for row in range(owner.draft, end):
            write(self.cache, owner.table, "draft", row, self.numbers.of(owner.tokens, row))
        for slot in range(len(owner.tokens), min(len(owner.tokens) + 3, owner.table.slots)):
            write(self.cache, owner.table, "draft", slot, self.numbers.rubbish())
        self.cache.commit(owner.table, "draft", owner.draft, range(owner.draft, end))
        owner.draft = end

    def truncate(self) -> None:
        owner, length = self._one(), self.random.randint(0, 12)
        self.cache.truncate(owner.table, "draft", length)
        owner.draft = min(owner.draft, length)

    def publish(self) -> None:
        owner = self._one()
        self.cache.publish(owner.table, "target", owner.tokens)

    def trim(self) -> None:
        owner = self._one()
        self.cache.trim(owner.table, len(owner.tokens))
        assert len(owner.table.pages) == -(-len(owner.tokens) // SIZE)

    def fork(self) -> None:
        owner = self._one()
        rows = self.random.randint(0, len(owner.tokens))
        if rows % SIZE and self.cache.available == 0:
            with pytest.raises(CacheFull):
                self.cache.fork(owner.table, rows)
            self.seen["full for a fork"] += 1
            return
        twin = self.cache.fork(owner.table, rows)
        assert twin.pages[: rows // SIZE] == owner.table.pages[: rows // SIZE], "full pages are shared"
        if rows % SIZE:
            assert twin.pages[-1] not in owner.table.pages, "a partial page is copied"
        self.live.append(Owner(twin, owner.tokens[:rows], min(rows, owner.draft)))

    def save(self) -> None:
        owner = self._one()
        self.live.remove(owner)
        self.asides.append((self.cache.save(owner.table), owner))

    def restore(self) -> None:
        if not self.asides:
            return
        saved, owner = self.asides[-1]
        if saved.count > self.cache.available:
            with pytest.raises(CacheFull):
                self.cache.restore(saved)
            self.seen["full for a return"] += 1
            return
        self.asides.pop()
        owner.table = self.cache.restore(saved)
        self.live.append(owner)

    def release(self) -> None:
        owner = self._one()
        self.live.remove(owner)
        self.cache.release(owner.table)

    def check_rows(self) -> None:
        for owner in self.live:
            for store, length in (("target", len(owner.tokens)), ("draft", owner.draft)):
                assert owner.table.lengths[store] == length
                assert read(self.cache, owner.table, store) == [self.numbers.of(owner.tokens, i) for i in range(length)]

    def check_pages(self) -> None:
        """Free, idle (kept for their content) and used pages are apart, and together they are all pages."""
        cache = self.cache
        users = Counter(page for owner in self.live for page in owner.table.pages)
        assert cache._users == [users[page] for page in range(CAPACITY)]
        assert sorted([*cache._free, *cache._idle, *users]) == list(range(CAPACITY))
        assert cache.available == CAPACITY - len(users)
        assert sorted(cache._index.values()) == sorted(cache._key_of) == sorted(cache._filled)
        assert all(len(tokens) == SIZE for _, tokens in cache._index), "only full pages are shared"


def test_every_sequence_reads_its_own_rows_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        model = Model(seed)
        for _ in range(250):
            model.act()
            model.check_rows()
            model.check_pages()
        for owner in model.live:
            model.cache.release(owner.table)
        assert model.cache.available == CAPACITY
        seen += model.seen
    assert min(seen.values()) > 20 and len(seen) == 5, "the walk has to come to the places where faults would be"


# -- what sharing must achieve ----------------------------------------------------------------------------------------


def grow(cache: PagedCache, table: PageTable, tokens: list[int], *more: list[int]) -> list[int]:
    """Commit pieces of text, sharing after each as the engine does."""
    tokens = list(tokens)
    for piece in more:
        start = len(tokens)
        tokens.extend(piece)
        cache.reserve(table, len(tokens))
        cache.commit(table, "target", start, range(start, len(tokens)))
        cache.publish(table, "target", tokens)
    return tokens


def test_full_pages_of_a_live_sequence_are_found() -> None:
    cache = make_cache()
    table = cache.open([])
    tokens = grow(cache, table, [], [1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11], [12], [13])
    for length in range(len(tokens) + 1):
        found = cache.open(tokens[:length])
        full = max(0, length - 1) // SIZE  # the last token is always computed again: its logits are needed
        assert found.pages == table.pages[:full]
        assert found.lengths == {"target": full * SIZE, "draft": 0}
        cache.release(found)


def test_another_prefix_is_not_found() -> None:
    cache = make_cache()
    table = cache.open([])
    tokens = grow(cache, table, [], list(range(13)))
    for wrong in range(13):
        found = cache.open([t + 50 * (i == wrong) for i, t in enumerate(tokens)])
        assert found.pages == table.pages[: min(wrong // SIZE, 3)]
    # The same tokens as in page 1, at the beginning of a text.
    assert cache.open(tokens[SIZE:]).pages == []


def test_a_fork_shares_what_it_adds() -> None:
    cache = make_cache()
    table = cache.open([])
    tokens = grow(cache, table, [], list(range(11)))
    twin = cache.fork(table, 6)
    other = grow(cache, twin, tokens[:6], [60, 61, 62], [63])
    assert cache.open([*other, 0]).pages == twin.pages[:2] != table.pages[:2]
    assert cache.open(tokens).pages == table.pages[:2]


def test_a_page_that_no_drafter_had_read_counts_when_one_has() -> None:
    cache = make_cache()
    text = [*[1] * SIZE, *[2] * SIZE, 3]
    brief, long = cache.open(text), cache.open(text)  # side by side: neither finds what the other has
    grow(cache, brief, [], text[:SIZE])  # ends before its drafter has read anything
    cache.reserve(long, len(text))
    for store in ("target", "draft"):
        cache.commit(long, store, 0, range(len(text)))
    cache.publish(long, "target", text)
    for known in (0, 2 * SIZE):
        found = cache.open(text)
        assert found.pages == [brief.pages[0], long.pages[1]]
        assert found.lengths == {"target": 2 * SIZE, "draft": known}
        cache.commit(found, "draft", 0, range(2 * SIZE))
        cache.publish(found, "target", text)


def test_released_pages_stay_findable_until_their_room_is_needed() -> None:
    cache = make_cache(pages=4)
    old, young = cache.open([]), cache.open([])
    old_tokens = grow(cache, old, [], [1] * SIZE, [1])
    young_tokens = grow(cache, young, [], [2] * SIZE, [2])
    cache.release(old)
    cache.release(young)
    assert cache.available == 4
    big = PageTable()
    cache.reserve(big, 3 * SIZE)  # two pages were never shared, the third must be the one that was let go first
    assert cache.open(old_tokens).pages == []
    assert len(cache.open(young_tokens).pages) == 1
    assert cache.available == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what is resident")
def test_room_for_a_long_context_takes_no_memory_until_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    layers, megabytes = 16, 8
    room = cache_module._zeros((layers, megabytes << 18), torch.float32, "cpu")
    room[:, 0] = 1.0  # what the first token of an answer does
    assert resident() - before < layers << 20
    assert float(room[3, 0]) == 1.0 and not room[:, 1:1000].any()


def test_a_page_without_the_rows_that_are_needed_is_not_taken_and_makes_way_for_one_that_has_them() -> None:
    cache = make_cache()
    text = [*[1] * SIZE, *[2] * SIZE, *[3] * SIZE, 4]
    plain = cache.open(text)
    grow(cache, plain, [], text[: 3 * SIZE])
    follower = cache.open(text, ["target"])
    assert follower.pages == plain.pages[:3]
    table = cache.open(text, ["draft"])
    assert table.pages == [] and table.lengths == {"target": 0, "draft": 0}
    cache.reserve(table, 2 * SIZE)
    cache.commit(table, "target", 0, range(2 * SIZE))
    cache.commit(table, "draft", 0, range(SIZE))  # of the second page it has too little itself
    cache.publish(table, "target", text)
    assert cache.open(text, ["draft"]).pages == table.pages[:1]
    assert cache.open(text).pages == [table.pages[0], *plain.pages[1:3]], "what follows the page is found as before"
    made_way = plain.pages[0]
    cache.release(plain)
    cache.release(follower)  # the last one that has it
    assert cache._allocate() == made_way, "a page that nobody can find is free"
