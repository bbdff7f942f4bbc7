"""What passes and drafts cost in milliseconds: a prior shape, corrected by the medians of real steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np

_KEPT = 9  # samples of a median: a busy machine slows single steps down
_MOST_ROWS = 320  # of a decoding pass; beyond, cost grows as fast as up to here
_EXACT_ROWS, _ROW_STEP = 32, 8  # up to the first number each count of rows has its own median, then every 8 rows
_CONTEXT_STEP = 256  # tokens: contexts are grouped by powers of two of this
_ROWS_FOR_CHEAP = 0.7  # plain passes that the cheap rows together cost
_ROWS_AT_ONCE, _ROWS_PER_PASS = 160, 850  # the same on a GPU: beyond the first it computes longer than it reads
_REFRESH = 4  # observations between two computations of a curve
_RECENT = 7  # passes that say how fast the machine is
_BUSY = 1.2  # times what a larger pass takes
_KNOWN = 3  # samples from which on a median says what a pass costs


def pass_shape(cheap_rows: int, weights_read: Callable[[int], float]) -> Callable[[int], float]:
    """A guess at the cost of a pass by its rows, relative to a single row.

    Rows cost what the weights that they read cost (those of an MoE wake more experts), and a little compute each.
    """

    def shape(rows: int) -> float:
        return weights_read(rows) / weights_read(1) * (1 + _ROWS_FOR_CHEAP * (rows - 1) / cheap_rows)

    return shape


def captured_shape(weights_read: Callable[[int], float]) -> Callable[[int], float]:
    """The same for captured passes on a GPU, where reading the weights takes longer than computing for many rows."""

    def shape(rows: int) -> float:
        computed = max(1 + rows / _ROWS_PER_PASS, rows / _ROWS_AT_ONCE)
        return weights_read(rows) / weights_read(1) * computed

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
        """Add a measured pass; the next `refreshed` curve knows it."""
        found = self.medians.setdefault(_row_class(rows), Median())
        found.add(ms)
        self._stale += _REFRESH if found.count <= _KNOWN else 1

    def refreshed(self) -> Curve:
        """The curve with what was measured since: computed anew every few passes, when somebody asks."""
        if self._stale >= _REFRESH:
            self.refresh()
        return self

    def refresh(self) -> None:
        """Compute the curve: the prior shape times the measured corrections, which are interpolated over rows.

        A pass that took much longer than one over more rows met a busy moment, and takes what that one took. Otherwise
        it would make all larger ones look dear, which then would not be measured again.
        """
        known = sorted(self.medians)
        values = np.array([self.medians[rows].value for rows in known])
        larger = np.minimum.accumulate(values[::-1])[::-1]  # the least of this pass and all larger ones
        corrections = np.where(values > _BUSY * larger, larger, values) / self._shape[known]
        ms = self._shape * np.interp(range(_MOST_ROWS + 1), known, corrections)
        self._ms, self._stale = np.maximum.accumulate(ms).tolist(), 0

    def samples(self, rows: int) -> int:
        """How many passes with about so many rows were measured."""
        found = self.medians.get(_row_class(rows))
        return 0 if found is None else found.count

    def known(self, rows: int) -> float | None:
        """The median of passes with about so many rows; None if too few were measured."""
        found = self.medians.get(_row_class(rows))
        return None if found is None or found.count < _KNOWN else found.value

    def __getitem__(self, rows: int) -> float:
        if rows <= _MOST_ROWS:
            return self._ms[rows]
        return self._ms[-1] + (rows - _MOST_ROWS) * (self._ms[-1] - self._ms[_MOST_ROWS // 2]) / (_MOST_ROWS // 2)


class _Pass(NamedTuple):
    """A measured pass; `ratio`: in terms of what such passes took before."""

    curve: Curve
    rows: int
    ms: float
    ratio: float


class PassCosts:
    """Curves by number of sequences and length of context. An unmeasured one starts from the nearest.

    Other programs come and go, and costs that were measured at different times are to be compared. So curves are in
    milliseconds at one pace, and `pace` says how much slower the machine is at present.
    """

    def __init__(self, shape: Callable[[int], float]) -> None:
        self._shape = shape
        self._curves: dict[tuple[int, int], Curve] = {}
        self._recent: deque[_Pass] = deque(maxlen=_RECENT)
        self.pace = 1.0

    def add(self, sequences: int, context: int, rows: int, ms: float) -> None:
        """Add a measured decoding pass."""
        curve = self._curve(sequences, context)
        known = curve.known(rows)
        if known is None:
            curve.add(rows, ms / self.pace)
            return
        self._recent.append(_Pass(curve, rows, ms, ms / known))
        self.pace = sorted(each.ratio for each in self._recent)[len(self._recent) // 2]
        if len(self._recent) == _RECENT:
            # The pace of a pass is that of its neighbours on both sides: so a sudden change spoils no median.
            middle = self._recent[_RECENT // 2]
            middle.curve.add(middle.rows, middle.ms / self.pace)

    def curve(self, sequences: int, context: int) -> Curve:
        """The curve for a decoding pass; `context`: tokens per sequence."""
        return self._curve(sequences, context).refreshed()

    def _curve(self, sequences: int, context: int) -> Curve:
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
            f"{sequences},{context}": {str(rows): round(m.value * self.pace, 4) for rows, m in curve.medians.items()}
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
        self._catch_up.setdefault(drafter, Median()).add(max(0.0, ms - self.call(drafter, 1, 0.0)) / tokens)

    def call(self, drafter: str, sequences: int, guess_ms: float) -> float:
        """Milliseconds of a call; `guess_ms`: if none was measured."""
        for size in _outward(sequences.bit_length()):
            if (found := self._calls.get((drafter, size))) is not None:
                return _cautious(found, guess_ms)
        return guess_ms

    def level(self, drafter: str) -> float:
        """Milliseconds of one more level."""
        found = self._levels.get(drafter)
        return 0.0 if found is None else found.value

    def catch_up(self, drafter: str, tokens: int, guess_ms: float) -> float:
        """Milliseconds to read `tokens` tokens before it can draft; `guess_ms`: of one, if none was measured."""
        found = self._catch_up.get(drafter)
        return tokens * (guess_ms if found is None else _cautious(found, guess_ms))

    def state(self, pace: float = 1.0) -> dict[str, Any]:
        """Plain data for a file, in milliseconds at the present pace."""
        calls = {f"{drafter}|{size}": round(pace * m.value, 4) for (drafter, size), m in self._calls.items()}
        levels = {drafter: round(pace * m.value, 4) for drafter, m in self._levels.items()}
        read = {drafter: round(pace * m.value, 6) for drafter, m in self._catch_up.items()}
        return {"calls": calls, "levels": levels, "catch_up": read}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what `state` gave."""
        for key, ms in state["calls"].items():
            drafter, _, size = key.rpartition("|")
            self._calls[drafter, int(size)] = Median(*[float(ms)] * _KNOWN)
        self._levels = {drafter: Median(*[float(ms)] * _KNOWN) for drafter, ms in state["levels"].items()}
        self._catch_up = {drafter: Median(*[float(ms)] * _KNOWN) for drafter, ms in state["catch_up"].items()}


def _cautious(found: Median, guess: float) -> float:
    """The median. A single sample counts half where it is higher than the guess: it may include work that is done once,
    or have met a busy moment, and a drafter that seems too slow is not measured again for long.
    """
    return math.sqrt(found.value * guess) if found.count == 1 and found.value > guess > 0.0 else found.value


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
