"""What passes and drafts cost in milliseconds: a prior shape, corrected by the medians of real steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_KEPT = 9  # samples of a median: a busy machine slows single steps down
_MOST_ROWS = 320  # of a decoding pass; beyond, cost grows as fast as up to here
_EXACT_ROWS, _ROW_STEP = 32, 8  # up to the first number each count of rows has its own median, then every 8 rows
_CONTEXT_STEP = 256  # tokens: contexts are grouped by powers of two of this
_ROWS_FOR_CHEAP = 0.7  # cost of all cheap rows together, in plain passes
_ROWS_AT_ONCE, _ROWS_PER_PASS = 160, 850  # on a GPU; beyond the first number a pass is compute-bound
_REFRESH = 4  # observations between two computations of a curve
_RECENT = 7  # passes that say how fast the machine is
_BUSY = 1.2  # times what a larger pass takes
_KNOWN = 3  # samples from which on a median says what a pass costs
_BESIDE = 0.05  # milliseconds of a draft besides the calls, where little is known
_BY_LEVELS = 1.5  # how much more a call may cost than its levels, which are not all alike
_DOUBTED = 1.25  # corrections of an earlier run may exceed the highest one of this run by this factor at most


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
    """The median of the last few samples: of an even number the lower one, as a busy machine errs upwards."""

    __slots__ = ("_samples", "confirmed", "count", "value")

    def __init__(self, start: float | None = None, *, confirmed: bool = True) -> None:
        """`confirmed`: whether `start` was measured in this run."""
        self._samples: deque[float] = deque([] if start is None else [start], maxlen=_KEPT)
        self.count = len(self._samples)
        self.value = start or 0.0
        self.confirmed = confirmed

    def add(self, sample: float) -> None:
        """Add a sample."""
        self._samples.append(sample)
        self.count += 1
        self.value = sorted(self._samples)[(len(self._samples) - 1) // 2]
        self.confirmed = True


class Curve:
    """Milliseconds of a pass by rows, at one number of sequences and one length of context."""

    def __init__(self, shape: Callable[[int], float]) -> None:
        self._shape = np.array([shape(max(1, rows)) for rows in range(_MOST_ROWS + 1)])
        self.medians: dict[int, Median] = {}
        self.own = False  # whether it was measured, and not copied from another
        self.highest = 0.0  # the highest correction that was measured in this run
        self.bound = math.inf  # of corrections that an earlier run measured
        self._stale = 0
        self._ms: list[float] = self._shape.tolist()

    def add(self, rows: int, ms: float) -> None:
        """Add a measured pass; the next `refreshed` curve knows it."""
        found = self.medians.setdefault(_row_class(rows), Median())
        found.add(ms)
        self.own = True
        self._stale += _REFRESH if found.count <= _KNOWN else 1

    def refreshed(self) -> Curve:
        """The curve with the latest measurements: recomputed on request, at most once every few passes."""
        if self._stale >= _REFRESH:
            self.refresh()
        return self

    def refresh(self) -> None:
        """Compute the curve: the prior shape times the measured corrections, which are interpolated over rows.

        A pass that took much longer than one over more rows was disturbed by other programs: the cost of the larger one
        is used. Otherwise all larger passes would look expensive and would not be measured again.
        """
        known = sorted(self.medians)
        values = np.array([self.medians[rows].value for rows in known])
        larger = np.minimum.accumulate(values[::-1])[::-1]  # the least of this pass and all larger ones
        corrections = np.where(values > _BUSY * larger, larger, values) / self._shape[known]
        confirmed = np.array([self.medians[rows].confirmed for rows in known])
        self.highest = float(corrections[confirmed].max(initial=0.0))
        bound = _DOUBTED * self.highest or self.bound
        corrections = np.where(confirmed, corrections, np.minimum(corrections, bound))
        ms = self._shape * np.interp(range(_MOST_ROWS + 1), known, corrections)
        self._ms, self._stale = np.maximum.accumulate(ms).tolist(), 0

    def samples(self, rows: int) -> int:
        """How many passes with about so many rows were measured."""
        found = self.medians.get(_row_class(rows))
        return 0 if found is None else found.count

    @property
    def measured(self) -> int:
        """How many passes were measured."""
        return sum(found.count for found in self.medians.values())

    def known(self, rows: int) -> float | None:
        """The median of passes with about so many rows; None if too few were measured."""
        found = self.medians.get(_row_class(rows))
        return None if found is None or found.count < _KNOWN else found.value

    def above(self, rows: int) -> RowsAbove:
        """The cost as a function of the rows that are added to `rows` others."""
        return RowsAbove(self, rows)

    def __getitem__(self, rows: int) -> float:
        if rows <= _MOST_ROWS:
            return self._ms[rows]
        return self._ms[-1] + (rows - _MOST_ROWS) * (self._ms[-1] - self._ms[_MOST_ROWS // 2]) / (_MOST_ROWS // 2)


@dataclass(frozen=True)
class RowsAbove:
    """A curve as a function of the rows that are added to those that the pass has in any case."""

    curve: Curve
    others: int

    def __getitem__(self, rows: int) -> float:
        return self.curve[rows + self.others]


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

    @property
    def measured(self) -> bool:
        """Whether any pass was measured in this run."""
        return any(curve.highest or curve.refreshed().highest for curve in self._curves.values())

    def curve(self, sequences: int, context: int) -> Curve:
        """The curve for a decoding pass; `context`: tokens per sequence."""
        found = self._curve(sequences, context).refreshed()
        if not found.highest and found.medians:
            nearest = self._nearest(_curve_key(sequences, context), lambda curve: curve.highest > 0.0)
            bound = math.inf if nearest is None else _DOUBTED * nearest.highest
            if bound != found.bound:
                found.bound = bound
                found.refresh()
        return found

    def _nearest(self, key: tuple[int, int], able: Callable[[Curve], bool]) -> Curve | None:
        near = [(abs(k[0] - key[0]) + abs(k[1] - key[1]), c) for k, c in self._curves.items() if able(c)]
        return min(near, key=lambda pair: pair[0])[1] if near else None

    def _curve(self, sequences: int, context: int) -> Curve:
        key = _curve_key(sequences, context)
        found = self._curves.get(key)
        if found is None:
            nearest = self._nearest(key, lambda curve: curve.own)
            found = self._curves[key] = Curve(self._shape)
            if nearest is not None:
                # One sample each: the first measurements of its own outweigh them.
                found.medians = {r: Median(m.value, confirmed=m.confirmed) for r, m in nearest.medians.items()}
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
            curve.medians = {int(rows): Median(float(ms), confirmed=False) for rows, ms in medians.items()}
            if curve.medians:
                curve.own = True
                curve.refresh()


class DraftCosts:
    """Milliseconds of a drafter's call and of a level by the number of sequences in it, and per token of catch-up."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], Median] = {}
        self._levels: dict[tuple[str, int], Median] = {}
        self._depths: dict[str, Median] = {}  # levels of a call
        self._catch_up: dict[str, Median] = {}
        self._beside = Median()

    def add(self, drafter: str, sequences: int, levels: int, ms: float, *, short: bool = False) -> None:
        """Add a measured call that had nothing to catch up on. `short`: it was asked for one level only."""
        place = drafter, sequences.bit_length()
        self._levels.setdefault(place, Median()).add(ms / (1 + levels))
        if not short:
            self._calls.setdefault(place, Median()).add(ms)
            self._depths.setdefault(drafter, Median()).add(levels)

    def add_beside(self, ms: float) -> None:
        """Add what merging, checks and selection took per sequence that drafted."""
        self._beside.add(ms)

    def add_catch_up(self, drafter: str, tokens: int, ms: float) -> None:
        """Add a call that read `tokens` tokens first."""
        self._catch_up.setdefault(drafter, Median()).add(max(0.0, ms - self.call(drafter, 1, 0.0)) / tokens)

    def call(self, drafter: str, sequences: int, guess_ms: float) -> float:
        """Milliseconds of a call; `guess_ms`: if none was measured.

        Bounded by the cost of its levels. These include levels of short calls, which are made where whole calls look
        too expensive.
        """
        found, level = _nearest(self._calls, drafter, sequences), _nearest(self._levels, drafter, sequences)
        if level is None:
            return guess_ms
        if found is None:  # there were short calls only
            return max(guess_ms, 2 * _cautious(level, guess_ms / 2))
        return min(_cautious(found, guess_ms), _BY_LEVELS * (1 + self._depths[drafter].value) * level.value)

    def level(self, drafter: str, sequences: int) -> float:
        """Milliseconds of one more level."""
        found = _nearest(self._levels, drafter, sequences)
        return 0.0 if found is None else found.value

    @property
    def beside(self) -> float:
        """Milliseconds of a draft besides the calls, per sequence."""
        return _cautious(self._beside, _BESIDE) if self._beside.count else _BESIDE

    def catch_up(self, drafter: str, tokens: int, guess_ms: float) -> float:
        """Milliseconds to read `tokens` tokens before it can draft; `guess_ms`: of one, if none was measured."""
        found = self._catch_up.get(drafter)
        return tokens * (guess_ms if found is None else _cautious(found, guess_ms))

    def state(self, pace: float = 1.0) -> dict[str, Any]:
        """Plain data for a file, in milliseconds at the present pace."""
        calls, levels = (
            {f"{drafter}|{size}": round(pace * m.value, 4) for (drafter, size), m in medians.items()}
            for medians in (self._calls, self._levels)
        )
        depths = {drafter: m.value for drafter, m in self._depths.items()}
        read = {drafter: round(pace * m.value, 6) for drafter, m in self._catch_up.items()}
        beside = {"beside": round(pace * self._beside.value, 4)} if self._beside.count else {}
        return {"calls": calls, "levels": levels, "depths": depths, "catch_up": read, **beside}

    def restore(self, state: Mapping[str, Any], *, doubted: bool = True) -> None:
        """Read what `state` gave. `doubted`: as one sample, which the first measurements correct."""

        def restored(ms: float) -> Median:
            found = Median(float(ms))
            found.count = 1 if doubted else _KNOWN
            return found

        for medians, name in ((self._calls, "calls"), (self._levels, "levels")):
            for key, ms in state[name].items():
                drafter, _, size = key.rpartition("|")
                medians[drafter, int(size)] = restored(ms)
        self._depths = {drafter: restored(levels) for drafter, levels in state["depths"].items()}
        self._catch_up = {drafter: restored(ms) for drafter, ms in state["catch_up"].items()}
        if "beside" in state:
            self._beside = restored(state["beside"])


def _cautious(found: Median, guess: float) -> float:
    """The median. A single sample counts half where it is higher than the guess: it may include one-time work, or
    other programs may have disturbed it, in this run or an earlier one. A drafter that seems
    too slow is not measured again for long.
    """
    return math.sqrt(found.value * guess) if found.count == 1 and found.value > guess > 0.0 else found.value


def _row_class(rows: int) -> int:
    if rows <= _EXACT_ROWS:
        return rows
    return min(_MOST_ROWS, -(-rows // _ROW_STEP) * _ROW_STEP)


def _curve_key(sequences: int, context: int) -> tuple[int, int]:
    return sequences.bit_length(), (context // _CONTEXT_STEP).bit_length()


def _nearest(medians: Mapping[tuple[str, int], Median], drafter: str, sequences: int) -> Median | None:
    """The median of calls with about so many sequences, else with fewer or more."""
    size = sequences.bit_length()
    near = [(abs(known - size), known, found) for (name, known), found in medians.items() if name == drafter]
    return min(near, key=lambda each: each[:2])[2] if near else None
