"""Programs: steps that kernels take one after the other, laid out as the team of threads reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
Step = tuple[int, Words]  # a function, and what it is called with


def program(steps: Sequence[Step]) -> Words:
    """A program of steps whose arguments lie where they are, and must outlive it."""
    return np.array([len(steps), *(word for code, words in steps for word in (code, words.ctypes.data))], np.int64)


class Call:
    """A small program that is made anew for every call, arguments and all, from a pattern: one piece of memory.

    Steps may share their arguments. The first argument is always the address of the number of rows.
    """

    def __init__(self, *steps: Step) -> None:
        places: dict[int, int] = {}
        pattern = list(program(steps))
        for _, words in steps:
            if id(words) not in places:
                places[id(words)] = len(pattern)
                pattern += list(words)
        self._pattern = np.array([*pattern, 0], np.int64)
        self._pointers = np.arange(2, 1 + 2 * len(steps), 2)
        self._offsets = 8 * np.array([places[id(words)] for _, words in steps])
        self._rows = np.array(list(places.values()))
        self.arguments = list(places.values())  # where those of each step begin

    def of(self, rows: int) -> Words:
        """The program for so many rows, with whatever else a call has of its own still to be filled in."""
        words = self._pattern.copy()
        address = words.ctypes.data
        words[self._pointers] = self._offsets + address
        words[self._rows] = address + 8 * (len(words) - 1)
        words[-1] = rows
        return words
