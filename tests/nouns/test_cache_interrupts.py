"""The paged cache when something is raised in the middle: every operation happens, or it does not.

An exception is raised in front of each line of `cache.py` in turn. Whatever it hits, no page may be lost or have two
owners, the sequences must read what they read before, and the same operation must then succeed.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from slipstream import cache as cache_module
from slipstream.cache import PageTable
from tests.native.tracing import interrupted
from tests.nouns.test_cache import SIZE, STORES, make_cache, read, write

PAGES = 8
FIRST = list(range(100, 100 + 2 * SIZE + 2))  # two full pages and a part of a third


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(cache_module, "PAGE_SIZE", SIZE)
    yield
    patch.undo()


class World:
    """A cache in the middle of its life: a shared sequence, its twin, one set aside, idle pages and free ones."""

    def __init__(self) -> None:
        self.cache = make_cache(PAGES)
        self.first, self.idle = self._grown(FIRST, 10), self._grown([7] * (SIZE + 1), 40)
        self.cache.release(self.idle)
        self.twin = self.cache.fork(self.first, SIZE)
        self.cache.reserve(self.twin, 2 * SIZE)
        aside = self._grown([8] * (SIZE + 1), 70)
        self.saved = self.cache.save(aside)
        self.rows = {store: read(self.cache, self.first, store) for store in STORES}

    def _grown(self, tokens: list[int], number: int) -> PageTable:
        table = self.cache.open(tokens)
        self.cache.reserve(table, len(tokens))
        for store in STORES:
            for slot in range(len(tokens)):
                write(self.cache, table, store, slot, number + slot)
            self.cache.commit(table, store, 0, range(len(tokens)))
        self.cache.publish(table, "target", tokens)
        return table

    def check(self, *others: PageTable) -> None:
        cache = self.cache
        users = Counter(page for table in (self.first, self.twin, *others) for page in table.pages)
        assert cache._users == [users[page] for page in range(PAGES)]
        assert sorted([*cache._free, *cache._idle, *users]) == list(range(PAGES))
        known = sorted(cache._key_of)
        assert sorted(cache._index.values()) == known == sorted(cache._filled) == sorted(cache._serial_of)
        assert all(cache._index[cache._key_of[page]] == page for page in known)
        assert set(cache._idle) <= set(known) and not set(cache._free) & set(known)
        for table in (self.first, self.twin):
            assert len(table.serials) <= len(table.pages)
            for store in STORES:
                assert table.lengths.get(store, 0) <= table.slots
        if self.first.pages:
            assert {store: read(cache, self.first, store) for store in STORES} == self.rows


Operation = Callable[[World], PageTable | None]


def restore(world: World) -> PageTable:
    table = world.cache.restore(world.saved)
    for store in STORES:
        assert read(world.cache, table, store) == [70 + slot for slot in range(SIZE + 1)]
    return table


def save(world: World) -> None:
    saved = world.cache.save(world.first)
    sys.settrace(None)
    assert not world.first.pages
    world.first = world.cache.restore(saved)


def publish(world: World) -> None:
    """The twin goes its own way."""
    cache = world.cache
    cache.reserve(world.twin, 2 * SIZE)
    cache.commit(world.twin, "target", SIZE, range(SIZE, 2 * SIZE))
    cache.publish(world.twin, "target", [*FIRST[:SIZE], *[9] * SIZE])
    assert len(world.twin.serials) == 2


def remove_store(world: World) -> None:
    """A store that is created again under an old name is empty: no rows may be marked as present."""
    cache = world.cache
    cache.remove_store("draft")
    sys.settrace(None)
    assert not any("draft" in filled for filled in cache._filled.values())
    cache.stores["draft"] = cache.stores["target"]


OPERATIONS: dict[str, Operation] = {
    "open": lambda world: world.cache.open([*FIRST, 1, 2, 3]),
    "open idle": lambda world: world.cache.open([7] * (SIZE + 1)),
    "reserve": lambda world: world.cache.reserve(world.twin, 3 * SIZE),
    "reserve idle": lambda world: world.cache.reserve(world.twin, (2 + world.cache.available) * SIZE),
    "trim": lambda world: world.cache.trim(world.twin, SIZE),
    "release": lambda world: world.cache.release(world.first),
    "publish": publish,
    "fork": lambda world: world.cache.fork(world.first, SIZE + 2),
    "save": save,
    "restore": restore,
    "forget_idle": lambda world: world.cache.forget_idle(),
    "remove_store": remove_store,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_happens_or_does_not(name: str) -> None:
    operation, line = OPERATIONS[name], 0
    while True:
        world = World()
        first, twin = copy.deepcopy(world.first), copy.deepcopy(world.twin)
        if not interrupted(functools.partial(operation, world), {cache_module.__file__}, line):
            break
        assert name != "remove_store" or "draft" in world.cache.stores, "its marks go first"
        world.check()
        if name in ("fork", "restore", "open", "open idle", "save", "reserve", "reserve idle"):
            assert (world.first.lengths, world.first.serials) == (first.lengths, first.serials)
            assert world.twin.pages == twin.pages
        made = operation(world)
        world.check(*([made] if made is not None else []))
        line += 1
    assert line > 3, "the lines of the cache were not reached"
