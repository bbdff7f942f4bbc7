"""Decides whether a built-in drafter's call was so slow that the drafter is dropped.

Its calls run in the engine's thread and cannot be interrupted: each is judged afterwards.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW_MS = 2000.0
SLOW_TIMES = 50.0  # times the usual time
WARM_UP = 3  # calls that may compile, load and allocate before any is judged
KEPT = 31  # the usual time is the median of so many calls


def slow(call_ms: float, usual_ms: float) -> bool:
    """Whether a call was slow in absolute terms and far slower than usual."""
    return call_ms > SLOW_MS and call_ms > SLOW_TIMES * usual_ms


class Stopwatch:
    """The usual time of one drafter's calls."""

    def __init__(self) -> None:
        self._calls: deque[float] = deque(maxlen=KEPT)

    def took(self, call_ms: float, *, fresh: bool = False) -> bool:
        """Record a call; returns whether it was slow. A `fresh` call is the first for some sequence and may have read a
        long prompt: it is neither judged nor recorded.
        """
        if fresh:
            return False
        judged = len(self._calls) >= WARM_UP and slow(call_ms, median(self._calls))
        self._calls.append(call_ms)
        return judged
