"""Weights are asked for before they are read, so that they come while others are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.native.emit import I8, Code, Value

_PARTS, _MORE_PARTS = 8, 32  # of a matrix for each thread, of which it takes one after the other; for many rows
_AHEAD = 4096  # bytes
_LINE = 64  # bytes that come together


class Fetch:
    """What a tile asks for of those that read the same one after the other: the first one what it will read itself
    soon, the others, each a share, what comes behind all that, in their first rounds.
    """

    def __init__(
        self, code: Code, start: Value, rounds: Value, step: int, tile: Value, tiles: Value, at_once: int = 1
    ) -> None:
        """`rounds` of `step` bytes are what each tile reads from `start` on, `at_once` of them in one go."""
        self._code = code
        self._step = step
        first = code.builder.icmp_signed("==", tile, code.whole(0))
        others = code.most(code.minus(tiles, 1), 1)
        share = code.times(code.over_up(rounds, code.times(others, at_once)), at_once)
        behind = code.plus(rounds, code.times(code.minus(tile, 1), share))
        distance = code.builder.select(first, code.whole(_AHEAD), code.times(behind, step))
        self._start = code.at(start, distance, I8)
        self.rounds = code.builder.select(first, rounds, code.least(share, rounds))  # in which it asks

    def round(self, number: Value) -> None:
        """Ask for what round `number` of the tile has to ask for."""
        place = self._code.times(number, self._step)
        for line in range(0, self._step, _LINE):
            self._code.prefetch(self._code.at(self._start, self._code.plus(place, line), I8))


@contextmanager
def panels_in_turn(code: Code, counter: Value, threads: Value, panels: Value, tiles: Value = 1) -> Iterator[Value]:
    """The body runs with the panels of a thread: parts of all, in each of which one follows the other.

    With one tile of rows (or a matrix unit) the time goes into reading, which likes long parts; with more it goes into
    multiplying, and small parts keep threads from waiting for each other.
    """
    alone = code.builder.icmp_signed("==", code.whole(tiles), code.whole(1))
    wanted = code.builder.select(alone, code.whole(_PARTS), code.whole(_MORE_PARTS))
    parts = code.least(panels, code.times(threads, wanted))
    with code.taking(counter, parts) as part, code.loop(*code.share(panels, part, parts)) as panel:
        yield panel


@contextmanager
def groups_in_turn(
    code: Code, counter: Value, threads: Value, panels: Value, most: int
) -> Iterator[tuple[Value, Value]]:
    """The body runs with groups of a thread's panels, (the first, how many): up to `most`, and about that many.

    Parts of a matrix, as above, are long enough for a group, as far as that leaves one for every thread.
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
