"""Weights are asked for before they are read, so that they come while others are multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from llvmlite import ir

from slipstream.native.emit import I8, Code, Value

_PARTS = 8  # of a matrix for each thread, of which it takes one after the other
_ASKING = 2  # tiles of a turn that ask
_AHEAD = 4096  # bytes
_LINE = 64  # bytes that come together


class Fetch:
    """What a tile asks for of those that read the same one after the other: the first one what it will read itself
    soon, the second what comes behind all that. The others have no time to ask: they do nothing but multiply.
    """

    def __init__(self, code: Code, start: Value, size: Value, step: int, tile: Value) -> None:
        """`size` of what the tiles read from `start` on, and `step`, what one round reads of it, in bytes."""
        self._code = code
        first = code.builder.icmp_signed("==", tile, code.whole(0))
        self._start = code.at(start, code.builder.select(first, code.whole(_AHEAD), size), I8)
        self._step = step

    def round(self, number: Value) -> None:
        """Ask for what round `number` of the tile has to ask for."""
        place = self._code.times(number, self._step)
        for line in range(0, self._step, _LINE):
            self._code.prefetch(self._code.at(self._start, self._code.plus(place, line), I8))


@contextmanager
def panels_in_turn(code: Code, counter: Value, threads: Value, panels: Value) -> Iterator[Value]:
    """The body runs with the panels of a thread: parts of all, in each of which one follows the other."""
    parts = code.least(panels, code.times(threads, _PARTS))
    with code.taking(counter, parts) as part, code.loop(*code.share(panels, part, parts)) as panel:
        yield panel


def choose_tile(
    code: Code, asking: Sequence[ir.Function], silent: Sequence[ir.Function], rows: Value, operands: list[Value]
) -> None:
    """Call the tile for so many rows; the first two of a turn are among those that ask. Operand 3 is its number."""
    early = code.builder.icmp_signed("<", operands[3], code.whole(_ASKING))
    with code.builder.if_else(early) as (yes, no):
        for branch, tiles in ((yes, asking), (no, silent)):
            with branch:
                code.choose(rows, [partial(code.builder.call, tile, operands) for tile in tiles])
