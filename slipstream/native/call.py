"""Programs: sequences of kernel calls, in the layout that the thread team reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

KernelArgs = npt.NDArray[np.int64]
Step = tuple[int, KernelArgs]  # a function, and its arguments


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's first number: `array.ctypes.data` takes five times as long."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def program(steps: Sequence[Step]) -> KernelArgs:
    """A program of steps; their arguments must outlive it."""
    return np.array([len(steps), *(number for code, args in steps for number in (code, address_of(args)))], np.int64)


class Call:
    """A small program that is copied for every call, arguments included, from a template: one allocation.

    Steps may share their arguments. The first argument is always the address of the number of rows.
    """

    def __init__(self, *steps: Step) -> None:
        places: dict[int, int] = {}
        pattern = list(program(steps))
        for _, args in steps:
            if id(args) not in places:
                places[id(args)] = len(pattern)
                pattern += list(args)
        self._pattern = np.array([*pattern, 0], np.int64)
        starts = [8 * places[id(args)] for _, args in steps]
        self._pointers = list(zip(range(2, 1 + 2 * len(steps), 2), starts, strict=True))
        self.arguments = list(places.values())  # where the arguments of each step begin

    def of(self, rows: int) -> KernelArgs:
        """The program for `rows` rows; the other arguments of the call are still to be set."""
        args = self._pattern.copy()
        address = address_of(args)
        for place, start in self._pointers:
            args[place] = address + start
        for place in self.arguments:
            args[place] = address + 8 * (len(args) - 1)
        args[-1] = rows
        return args
