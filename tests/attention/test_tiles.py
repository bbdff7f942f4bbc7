"""What tiles say of themselves, which decides how kernels are launched."""

from __future__ import annotations

import pytest

from slipstream.attention import Segment, tree_segment
from slipstream.attention.tiles import Tiles, query_block, query_blocks
from slipstream.cache import PagedCache


def segments(*lengths: int) -> list[Segment]:
    cache, found = PagedCache(64, "cpu"), []
    for length in lengths:
        table = cache.open([])
        cache.reserve(table, length)
        found.append(tree_segment(table, 0, list(range(length)), None))
    return found


@pytest.mark.parametrize(("lengths", "lone"), [((1, 1, 1), True), ((3,), False), ((1, 2), False), ((24,), False)])
def test_tiles_are_lone_if_every_sequence_has_one_row(lengths: tuple[int, ...], lone: bool) -> None:
    assert Tiles.of(segments(*lengths), 2, "cpu").lone is lone


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 80])
def test_every_size_of_tiles_is_among_those_that_are_compiled(group: int) -> None:
    assert {query_block(group, rows) for rows in range(1, 1000)} == set(query_blocks(group))
