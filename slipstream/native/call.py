"""Programs: sequences of kernel calls, in the layout that the thread team reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
Step = tuple[int, Words]  # a function, and its arguments


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's first number: `array.ctypes.data` takes five times as long."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def program(steps: Sequence[Step]) -> Words:
    """A program of steps; their arguments must outlive it."""
    return np.array([len(steps), *(word for code, words in steps for word in (code, address_of(words)))], np.int64)


class Call:
    """A small program that is copied for every call, arguments included, from a template: one allocation.

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
        starts = [8 * places[id(words)] for _, words in steps]
        self._pointers = list(zip(range(2, 1 + 2 * len(steps), 2), starts, strict=True))
        self.arguments = list(places.values())  # where those of each step begin

    def of(self, rows: int) -> Words:
        """The program for `rows` rows; the other arguments of the call are still to be set."""
        words = self._pattern.copy()
        address = address_of(words)
        for place, start in self._pointers:
            words[place] = address + start
        for place in self.arguments:
            words[place] = address + 8 * (len(words) - 1)
        words[-1] = rows
        return words
