"""What rounds of one size of batch need on the device, and what they give on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention import LaneTiles
from slipstream.drafters.device_draft import DeviceDraft, DeviceLoop
from slipstream.engine.endings import ends_of
from slipstream.lanes import Lanes
from slipstream.sequence import Sequence

TAKEN = 2  # where the tokens begin in what a round tells of a lane, behind how many were accepted and the deepest node
_ENDED = 8  # a burst stops where one in so many lanes has come to its end


@dataclass(frozen=True, eq=False)
class Size:
    """All that rounds of one size of batch need."""

    lanes: Lanes
    draft: DeviceDraft | None
    loop: DeviceLoop | None
    rounds: int  # of a burst at most
    tiles: LaneTiles
    told: torch.Tensor  # int64 [2 * rounds, lanes, TAKEN + depth + 1]; bursts take turns
    heard: torch.Tensor  # the same for the host
    number: torch.Tensor  # int64 [1]: the line of the next round

    def known(self, sequence: Sequence) -> int:
        """How many tokens of a sequence the drafter need not be told."""
        return len(sequence.tokens) - 1 if self.draft is None else self.draft.known(sequence)


class Collected:
    """What rounds gave, on its way to the host: sent behind each round, read when the next one is under way."""

    first_line: int

    def __init__(self, size: Size, sequences: list[Sequence], left: Seq[int], after: Collected | None = None) -> None:
        """`left`: tokens that each may still get. `after`: what the rounds before gave, if that is still read."""
        first = self.first_line = size.rounds if after is not None and after.first_line == 0 else 0
        self._told = size.told[first : first + size.rounds]
        self._heard = size.heard[first : first + size.rounds]
        self._most = 1 + size.lanes.depth  # tokens of a round
        self._lanes = len(sequences)
        self._events: list[torch.cuda.Event] = []
        ends = set().union(*map(ends_of, sequences))
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._seen = 0  # rounds in which ends have been looked for
        self._left = np.array(left)
        self._over = np.zeros(self._lanes, dtype=np.bool_)

    def send(self, number: int) -> None:
        """Copy what a round gave, when it is over."""
        if self._told.is_cuda:
            self._heard[number].copy_(self._told[number], non_blocking=True)
            self._events.append(torch.cuda.Event())
            self._events[-1].record()

    @property
    def left(self) -> list[int]:
        """Tokens that each sequence may still get behind the rounds in which ends have been looked for."""
        left: list[int] = self._left.tolist()
        return left

    def over(self, number: int) -> bool:
        """Whether round `number` would be one too many.

        The round before the last one is over by now, or soon; the last one keeps the device busy meanwhile. Where that
        may be the last for many, it is waited for itself: the next would be in vain.
        """
        return self._ended(number - 2) or (self._may_end() and self._ended(number - 1))

    def any_ended(self, number: int) -> bool:
        """Whether any answer has ended after round `number` and all before it."""
        self._look(number)
        return bool(self._over.any())

    def _may_end(self) -> bool:
        """Whether one more round than have been seen may end as many answers as stop a burst, by their lengths."""
        return self._many(self._over | (self._left <= self._most))

    def _ended(self, number: int) -> bool:
        """Whether so many answers have ended, after round `number` and all before it, that the burst stops."""
        self._look(number)
        return self._many(self._over)

    def _look(self, number: int) -> None:
        """Look for ends in all rounds up to this one."""
        while self._seen <= number:
            lines = self.read(self._seen, self._seen + 1)[0]
            tokens, counts = lines[:, TAKEN:], lines[:, 0] + 1
            counted = np.arange(tokens.shape[1]) < counts[:, None]
            self._left -= counts
            self._over |= (np.isin(tokens, self._ends) & counted).any(1) | (self._left <= 0)
            self._seen += 1

    def _many(self, lanes: npt.NDArray[np.bool_]) -> bool:
        return _ENDED * int(lanes.sum()) >= self._lanes

    def taken(self, rounds: int) -> list[int]:
        """How many tokens each sequence was told in so many rounds, which are over."""
        counts: list[int] = (self._heard[:rounds, : self._lanes, 0] + 1).sum(0).tolist()
        return counts

    def read(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """What rounds `first` to `stop` gave, as soon as the last of them is over."""
        if self._told.is_cuda:
            self._events[stop - 1].synchronize()
        lines: npt.NDArray[np.int64] = self._heard[first:stop, : self._lanes].numpy()
        return lines
