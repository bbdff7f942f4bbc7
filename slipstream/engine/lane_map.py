"""Which sequence has which lane of a batch. A sequence keeps its lane from burst to burst; a finished one frees it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from slipstream.sequence import Sequence


class LanePosition(NamedTuple):
    """A sequence and where a burst left it. A lane goes on only if nothing else has happened to its sequence since."""

    sequence: Sequence
    cached: int
    tokens: int
    known: int


class LaneMap:
    """The lanes of buffers of one size."""

    def __init__(self, size: int) -> None:
        self._left: list[LanePosition | None] = [None] * size  # as the last burst left them
        self._filled: set[int] = set()  # lanes whose device state is a sequence's

    def take(self, positions: Seq[LanePosition]) -> tuple[list[int], dict[int, Sequence | None]]:
        """A lane for each sequence, and the lanes that have to be set up; None: the lane becomes idle.

        Until `leave`, no lane is known to be in order: if a burst fails, the next one sets up all of its lanes.
        """
        going_on = {position: lane for lane, position in enumerate(self._left) if position is not None}
        lanes = [going_on.get(position) for position in positions]
        free = iter(sorted(set(range(len(self._left))).difference(lane for lane in lanes if lane is not None)))
        taken = [next(free) if lane is None else lane for lane in lanes]
        fresh: dict[int, Sequence | None] = dict.fromkeys(sorted(self._filled.difference(taken)))
        for lane, known, position in zip(taken, lanes, positions, strict=True):
            if known is None:
                fresh[lane] = position.sequence
        self._left, self._filled = [None] * len(self._left), set(taken)
        return taken, fresh

    def leave(self, lanes: Seq[int], positions: Seq[LanePosition]) -> None:
        """Record the position of each sequence that continues after a burst."""
        for lane, position in zip(lanes, positions, strict=True):
            if not position.sequence.finished:
                self._left[lane] = position

    def forget(self) -> None:
        """Set up all lanes anew."""
        self._left = [None] * len(self._left)
