"""Prefetching: weights are requested before they are read, while others are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from slipstream.native.ir import I8, Code, Value

_PARTS, _MORE_PARTS = 8, 32  # parts of a matrix per thread, processed one after the other; for many rows
_FEW_PARTS, _PANELS = 4, 16  # parts per thread at least, and panels of a part at most, where panels are prefetched
_AHEAD = 4096  # bytes
_LINE = 64  # bytes of a cache line
_FRACTION = 16  # bits


class Fetch:
    """The prefetches of tiles that read the same weights one after the other. The first tile prefetches what it will
    soon read itself. Each of the others prefetches, in its first rounds, a share of the weights that come after those.
    """

    def __init__(
        self, code: Code, start: Value, rounds: Value, step: int, tile: Value, tiles: Value, at_once: int = 1
    ) -> None:
        """Each tile reads `rounds` of `step` bytes from `start` on, `at_once` of them at a time."""
        self._code = code
        self._step = step
        first = code.builder.icmp_signed("==", tile, code.whole(0))
        others = code.most(code.minus(tiles, 1), 1)
        share = code.times(code.over_up(rounds, code.times(others, at_once)), at_once)
        after = code.plus(rounds, code.times(code.minus(tile, 1), share))
        distance = code.builder.select(first, code.whole(_AHEAD), code.times(after, step))
        self._start = code.at(start, distance, I8)
        self.rounds = code.builder.select(first, rounds, code.least(share, rounds))  # rounds that prefetch

    def round(self, number: Value) -> None:
        """Issue the prefetches of round `number`."""
        place = self._code.times(number, self._step)
        for line in range(0, self._step, _LINE):
            self._code.prefetch(self._code.at(self._start, self._code.plus(place, line), I8))


class Turn(NamedTuple):
    """Whose turn it is: tile `tile` of `tiles` on a panel, which is the first or the last one of a thread's part."""

    tile: Value
    tiles: Value
    first: Value
    last: Value


class SteadyFetch:
    """Prefetches of tiles each of which reads all inputs of a panel. Each requests a share of the next panel, evenly
    over all its rounds: memory is never idle while a tile multiplies what is in the cache. The first panel of a part
    has not been requested by any tile: its first tile reads it ahead.
    """

    def __init__(self, code: Code, start: Value, rounds: Value, step: int, turn: Turn) -> None:
        """Each tile reads `rounds` of `step` bytes from `start` on."""
        self._code, self._start, self._step = code, start, step
        builder, one = code.builder, code.whole(1)
        unread = builder.or_(builder.icmp_signed("==", turn.tiles, one), turn.first)
        reads_ahead = builder.and_(unread, builder.icmp_signed("==", turn.tile, code.whole(0)))
        others = builder.select(turn.first, one, code.whole(0))  # tiles that do not take part in the next panel
        sharers = code.most(code.minus(turn.tiles, others), 1)
        size = code.times(rounds, step)
        after = code.plus(size, code.times(code.minus(turn.tile, others), code.over_up(size, sharers)))
        after = builder.select(turn.last, code.whole(0), after)  # the panel after the last one is another thread's
        self._distance = builder.select(reads_ahead, code.whole(_AHEAD), after)
        slowly = code.over(code.whole(step << _FRACTION), sharers)  # bytes a round, in fixed point
        self._advance = builder.select(reads_ahead, code.whole(step << _FRACTION), slowly)

    def round(self, number: Value) -> None:
        """Issue the prefetches of round `number`. Several tiles request some lines twice, which costs little."""
        code = self._code
        advanced = code.builder.lshr(code.times(number, self._advance), code.whole(_FRACTION))
        place = code.plus(self._distance, code.builder.and_(advanced, code.whole(-_LINE)))
        for line in range(0, self._step, _LINE):
            code.prefetch(code.at(self._start, code.plus(place, line), I8))


@contextmanager
def panels_in_turn(code: Code, counter: Value, threads: Value, panels: Value, tiles: Value = 1) -> Iterator[Value]:
    """The body runs with the panels of a thread, in contiguous parts.

    With one tile of rows (or a matrix unit) the time goes into reading, which prefers long parts; with more it goes
    into compute, and small parts balance the threads.
    """
    alone = code.builder.icmp_signed("==", code.whole(tiles), code.whole(1))
    wanted = code.builder.select(alone, code.whole(_PARTS), code.whole(_MORE_PARTS))
    parts = code.least(panels, code.times(threads, wanted))
    with code.taking(counter, parts) as part, code.loop(*code.share(panels, part, parts)) as panel:
        yield panel


@contextmanager
def parts_in_turn(
    code: Code, counter: Value, threads: Value, panels: Value, tiles: Value
) -> Iterator[tuple[Value, Value]]:
    """The body runs with the contiguous parts of a thread, (first panel, last panel + 1), for `SteadyFetch`.

    Several tiles prefetch from panel to panel, so their parts are no shorter than balancing the threads needs.
    """
    one, builder = code.whole(1), code.builder
    several = code.most(code.times(threads, _FEW_PARTS), code.over(panels, _PANELS))
    several = builder.select(builder.icmp_signed("==", threads, one), one, several)
    wanted = builder.select(builder.icmp_signed("==", tiles, one), code.times(threads, _PARTS), several)
    parts = code.least(panels, wanted)
    with code.taking(counter, parts) as part:
        yield code.share(panels, part, parts)


@contextmanager
def groups_in_turn(
    code: Code, counter: Value, threads: Value, panels: Value, most: int
) -> Iterator[tuple[Value, Value]]:
    """The body runs with groups of a thread's panels, (the first, how many): up to `most`, and about that many.

    Parts of a matrix, as above, are long enough for a group, as long as there is one for every thread.
    """
    each = code.most(1, code.least(_PARTS, code.over(panels, code.times(threads, most))))
    parts = code.least(panels, code.times(threads, each))
    with code.taking(counter, parts) as part:
        first, last = code.share(panels, part, parts)
        length = code.minus(last, first)
        count = code.over_up(length, most)
        with code.loop(0, count) as group:
            begin, end = code.share(length, group, count)
            yield code.plus(first, begin), code.minus(end, begin)
