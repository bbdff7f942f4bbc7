"""What passes and drafts cost in milliseconds: a prior shape, corrected by the medians of real steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np

_KEPT = 9  # samples of a median: a busy machine slows single steps down
_MOST_ROWS = 320  # of a decoding pass; beyond, cost grows as fast as up to here
_EXACT_ROWS, _ROW_STEP = 32, 8  # up to the first number each count of rows has its own median, then every 8 rows
_CONTEXT_STEP = 256  # tokens: contexts are told apart by powers of two of this
_ROWS_FOR_CHEAP = 0.7  # plain passes that the cheap rows together cost
_REFRESH = 4  # observations between two computations of a curve


def pass_shape(cheap_rows: int, weights_read: Callable[[int], float]) -> Callable[[int], float]:
    """A guess at the cost of a pass by its rows, relative to a single row.

    Rows cost what the weights that they read cost (those of an MoE wake more experts), and a little compute each.
    """

    def shape(rows: int) -> float:
        return weights_read(rows) / weights_read(1) * (1 + _ROWS_FOR_CHEAP * (rows - 1) / cheap_rows)

    return shape


class Median:
    """The median of the last few samples."""

    __slots__ = ("_samples", "count", "value")

    def __init__(self, *samples: float) -> None:
        self._samples: deque[float] = deque(samples, maxlen=_KEPT)
        self.count = len(samples)
        self.value = median(samples) if samples else 0.0

    def add(self, sample: float) -> None:
        """Add a sample."""
        self._samples.append(sample)
        self.count += 1
        self.value = sorted(self._samples)[len(self._samples) // 2]


class Curve:
    """Milliseconds of a pass by rows, at one number of sequences and one length of context."""

    def __init__(self, shape: Callable[[int], float]) -> None:
        self._shape = np.array([shape(max(1, rows)) for rows in range(_MOST_ROWS + 1)])
        self.medians: dict[int, Median] = {}
        self._stale = 0
        self._ms: list[float] = self._shape.tolist()

    def add(self, rows: int, ms: float) -> None:
        """Add a measured pass."""
        self.medians.setdefault(_row_class(rows), Median()).add(ms)
        self._stale += 1
        if self._stale >= _REFRESH or len(self.medians) == 1:
            self.refresh()

    def refresh(self) -> None:
        """Compute the curve: the prior shape times the measured corrections, which are interpolated over rows."""
        known = sorted(self.medians)
        corrections = [self.medians[rows].value / self._shape[rows] for rows in known]
        ms = self._shape * np.interp(range(_MOST_ROWS + 1), known, corrections)
        self._ms, self._stale = np.maximum.accumulate(ms).tolist(), 0

    def samples(self, rows: int) -> int:
        """How many passes with about so many rows were measured."""
        found = self.medians.get(_row_class(rows))
        return 0 if found is None else found.count

    def __getitem__(self, rows: int) -> float:
        if rows <= _MOST_ROWS:
            return self._ms[rows]
        return self._ms[-1] + (rows - _MOST_ROWS) * (self._ms[-1] - self._ms[_MOST_ROWS // 2]) / (_MOST_ROWS // 2)


class PassCosts:
    """Curves by number of sequences and length of context. An unmeasured one starts from the nearest."""

    def __init__(self, shape: Callable[[int], float]) -> None:
        self._shape = shape
        self._curves: dict[tuple[int, int], Curve] = {}

    def curve(self, sequences: int, context: int) -> Curve:
        """The curve for a decoding pass; `context`: tokens per sequence."""
        key = sequences.bit_length(), (context // _CONTEXT_STEP).bit_length()
        found = self._curves.get(key)
        if found is None:
            found = self._curves[key] = Curve(self._shape)
            near = [(abs(k[0] - key[0]) + abs(k[1] - key[1]), c) for k, c in self._curves.items() if c.medians]
            if near:
                nearest = min(near, key=lambda pair: pair[0])[1]
                # One sample each: the first measurements of its own outweigh them.
                found.medians = {rows: Median(m.value) for rows, m in nearest.medians.items()}
                found.refresh()
        return found

    def state(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {
            f"{sequences},{context}": {str(rows): round(m.value, 4) for rows, m in curve.medians.items()}
            for (sequences, context), curve in self._curves.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what `state` gave."""
        for key, medians in state.items():
            sequences, context = map(int, key.split(","))
            curve = self._curves[sequences, context] = Curve(self._shape)
            curve.medians = {int(rows): Median(*[float(ms)] * 3) for rows, ms in medians.items()}
            if curve.medians:
                curve.refresh()


class DraftCosts:
    """Milliseconds of a drafter's call by the number of sequences in it, per level, and per token of catch-up."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], Median] = {}
        self._levels: dict[str, Median] = {}
        self._catch_up: dict[str, Median] = {}

    def add(self, drafter: str, sequences: int, levels: int, ms: float) -> None:
        """Add a measured call that had nothing to catch up on."""
        self._calls.setdefault((drafter, sequences.bit_length()), Median()).add(ms)
        self._levels.setdefault(drafter, Median()).add(ms / (1 + levels))

    def add_catch_up(self, drafter: str, tokens: int, ms: float) -> None:
        """Add a call that read `tokens` tokens first."""
        known = self.call(drafter, 1)
        self._catch_up.setdefault(drafter, Median()).add(max(0.0, ms - (known or 0.0)) / tokens)

    def call(self, drafter: str, sequences: int) -> float | None:
        """Milliseconds of a call; None if none was measured."""
        for size in _outward(sequences.bit_length()):
            if (found := self._calls.get((drafter, size))) is not None:
                return found.value
        return None

    def level(self, drafter: str) -> float:
        """Milliseconds of one more level."""
        found = self._levels.get(drafter)
        return 0.0 if found is None else found.value

    def catch_up(self, drafter: str, tokens: int) -> float:
        """Milliseconds to read `tokens` tokens before it can draft."""
        found = self._catch_up.get(drafter)
        return 0.0 if found is None else found.value * tokens

    def state(self) -> dict[str, Any]:
        """Plain data for a file."""
        calls = {f"{drafter}|{size}": round(m.value, 4) for (drafter, size), m in self._calls.items()}
        levels = {drafter: round(m.value, 4) for drafter, m in self._levels.items()}
        return {"calls": calls, "levels": levels, "catch_up": {d: round(m.value, 6) for d, m in self._catch_up.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what `state` gave."""
        for key, ms in state["calls"].items():
            drafter, _, size = key.rpartition("|")
            self._calls[drafter, int(size)] = Median(float(ms))
        self._levels = {drafter: Median(float(ms)) for drafter, ms in state["levels"].items()}
        self._catch_up = {drafter: Median(float(ms)) for drafter, ms in state["catch_up"].items()}


def _row_class(rows: int) -> int:
    if rows <= _EXACT_ROWS:
        return rows
    return min(_MOST_ROWS, -(-rows // _ROW_STEP) * _ROW_STEP)


def _outward(size: int) -> Iterator[int]:
    """`size`, then its neighbours, the nearest first."""
    yield size
    for distance in range(1, 12):
        yield size - distance
        yield size + distance
