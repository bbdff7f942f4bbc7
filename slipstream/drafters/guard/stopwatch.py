"""Decides whether a built-in drafter's call was so slow that the drafter is dropped.

Its calls run in the engine's thread and cannot be interrupted: each is judged afterwards, in two ways. One call that
takes far longer than usual is too slow. So are several calls in a row in each of which the target would have decoded
twice the tokens of the deepest draft: no draft is worth that.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW_MS = 2000.0
SLOW_TIMES = 50.0  # a slow call takes this many times the usual time
WARM_UP = 3  # calls that may compile, load and allocate before any is judged
KEPT = 31  # calls whose median is the usual time
LONG_MS = 500.0
LONG_TIMES = 2.0  # a long call takes this many times the target's passes for as many tokens
LONG_CALLS = 3  # long calls in a row after which a drafter is dropped


def slow(call_ms: float, usual_ms: float) -> bool:
    """Whether a call was slow in absolute terms and far slower than usual."""
    return call_ms > SLOW_MS and call_ms > SLOW_TIMES * usual_ms


def long(call_ms: float, pass_ms: float, depth: int) -> bool:
    """Whether a call was long in absolute terms and against passes of the target."""
    return call_ms > LONG_MS and call_ms > LONG_TIMES * (1 + depth) * pass_ms


class Stopwatch:
    """The usual time of one drafter's calls."""

    def __init__(self) -> None:
        self._calls: deque[float] = deque(maxlen=KEPT)
        self._long = 0  # long calls in a row

    def took(self, call_ms: float, *, depth: int = 0, pass_ms: float | None = None, fresh: bool = False) -> bool:
        """Record a call; returns whether it was too slow. `depth`: of the deepest tree that was asked for; `pass_ms`:
        of the target, if known. A `fresh` call is the first for some sequence and may have read a long prompt: it is
        neither judged nor recorded.
        """
        if fresh:
            return False
        judged = len(self._calls) >= WARM_UP and slow(call_ms, median(self._calls))
        self._calls.append(call_ms)
        self._long = self._long + 1 if pass_ms is not None and long(call_ms, pass_ms, depth) else 0
        return judged or self._long >= LONG_CALLS
