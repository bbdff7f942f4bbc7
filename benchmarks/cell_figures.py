"""Speed-ups over plain decoding from rows of `cells.py`, with two intervals (95%).

*timing* holds for repeated measurements of these prompts on this machine. A unit is what was asked together (one
prompt, or a batch). The noise is the scatter of a unit's rounds around its own mean, pooled over units: 16 prompts and
two rounds have 16 degrees of freedom, where two sums, one of each round, would have one. A cell of few units takes the
scatter of its peers, the cells of the same weights and batch. If the sums of whole rounds scatter more than units do,
the larger scatter is used: then something slowed a whole round, and two rounds say little about that.

*prompts* holds for other prompts of the same kind: a bootstrap over prompts, cell by cell.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from benchmarks.cells import Cell, Row, learns
from slipstream.bench.intervals import Bootstrap, Column, student
from slipstream.bench.schedule import PLAIN

K = TypeVar("K", bound=Hashable)

_FREEDOM = 8  # degrees of freedom below which a cell takes the noise of its peers
LEAST, LEAST_LOW, MOST_TTFT, MOST_WIDTH = 0.98, 0.95, 1.02, 0.03


class Figure(NamedTuple):
    """A speed-up, its two intervals, and other ratios."""

    value: float
    timing: float | None  # half the width of the interval, as a logarithm; None with one round
    low: float | None  # ends of the interval over prompts
    high: float | None
    ttft: float  # sum of TTFTs over the sum of plain decoding's
    ttft_medians: float
    throughput: float  # tokens over the time of all, over that of plain decoding
    tokens_per_second: float
    identical: bool

    @property
    def lower(self) -> float | None:
        """The lower end of the timing interval."""
        return None if self.timing is None else self.value * math.exp(-self.timing)

    @property
    def misses(self) -> list[str]:
        """The criteria that are not met."""
        met = {
            "texts": self.identical,
            "speed-up": self.value >= LEAST,
            "one round": self.lower is not None,
            "lower end": self.lower is None or self.lower >= LEAST_LOW,
            "TTFT": self.ttft <= MOST_TTFT,
        }
        return [name for name, true in met.items() if not true]


def figure(rows: Sequence[Row], peers: Sequence[Row] = ()) -> Figure:
    """The figures of one setting. `peers`: rows of it with the same weights and batch."""
    prompts = _grouped(rows, lambda row: (row.cell, row.prompt))
    mine, plain = (
        np.array([np.mean([getattr(row, name) for row in listed]) for listed in prompts.values()])
        for name in ("e2e_ms", "plain_e2e_ms")
    )
    interval = Bootstrap([listed[0].cell for listed in prompts.values()]).ratio(plain, mine)
    noise = timing_noise(rows, peers)
    first, plain_first = [row.ttft_ms for row in rows], [row.plain_ttft_ms for row in rows]
    wall = sum(row.wall_ms for row in rows)
    return Figure(
        interval.value,
        None if noise is None else student(noise.freedom) * noise.error,
        interval.low,
        interval.high,
        sum(first) / sum(plain_first),
        float(np.median(first) / np.median(plain_first)),
        sum(row.plain_wall_ms for row in rows) / wall,
        1000 * sum(row.tokens for row in rows) / wall,
        all(row.same for row in rows),
    )


class Noise(NamedTuple):
    """The standard error of a speed-up's logarithm, and its degrees of freedom."""

    error: float
    freedom: int


class _Unit(NamedTuple):
    """One prompt or batch: its share of all time, and its scatter over rounds (logarithms, over the share)."""

    share: float
    scatter: dict[int, float]  # by round

    @property
    def freedom(self) -> int:
        return len(self.scatter) - 1


def timing_noise(rows: Sequence[Row], peers: Sequence[Row] = ()) -> Noise | None:
    """The noise of a speed-up, estimated from repetitions; None if nothing was repeated."""
    units = _units(rows)
    known = units
    if sum(unit.freedom for unit in units) < _FREEDOM:
        cells = _grouped(peers, lambda row: row.cell).values()
        others = [unit for cell in cells for unit in _units(cell)]
        known = max(units, others, key=lambda listed: sum(unit.freedom for unit in listed))
    freedom = sum(unit.freedom for unit in known)
    if freedom < 1:
        return None
    each = sum(found**2 for unit in known for found in unit.scatter.values()) / freedom
    variance = each * sum(unit.share**2 / len(unit.scatter) for unit in units)
    whole: defaultdict[int, float] = defaultdict(float)
    for unit in units:
        for round_, found in unit.scatter.items():
            whole[round_] += unit.share * found
    if len(whole) > 1:
        of_rounds = sum(found**2 for found in whole.values()) / (len(whole) - 1) / len(whole)
        variance = max(variance, of_rounds)
    return Noise(math.sqrt(variance), freedom)


def _units(rows: Sequence[Row]) -> list[_Unit]:
    times: list[tuple[list[int], Column, Column]] = []
    for listed in _grouped(rows, lambda row: (row.cell, row.prompt if row.batch == 1 else "")).values():
        by_round = _grouped(listed, lambda row: row.round)
        mine = np.array([sum(row.e2e_ms for row in some) for some in by_round.values()])
        plain = np.array([sum(row.plain_e2e_ms for row in some) for some in by_round.values()])
        times.append((list(by_round), mine, plain))
    mine_all, plain_all = sum(mine.mean() for _, mine, _ in times), sum(plain.mean() for _, _, plain in times)
    units = []
    for rounds, mine, plain in times:
        # The logarithm of a ratio of sums moves by each part's share of its sum.
        above, below = plain.mean() / plain_all, mine.mean() / mine_all
        moved = above * np.log(plain) - below * np.log(mine)
        share = (above + below) / 2
        scatter = (moved - moved.mean()) / share
        units.append(_Unit(float(share), dict(zip(rounds, scatter.tolist(), strict=True))))
    return units


class BesideFixed(NamedTuple):
    """`auto` and the best fixed setting, chosen on one half of the prompts and scored on the other; both ways."""

    chosen: tuple[str, str]
    fixed: float
    auto: float

    @property
    def ratio(self) -> float:
        return self.auto / self.fixed


def beside_fixed(rows: Sequence[Row]) -> BesideFixed | None:
    """Of a cell's rows; None unless `auto` and a fixed setting have answered two prompts or more."""
    times: defaultdict[str, defaultdict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        times[row.setting][row.prompt].append((row.plain_e2e_ms, row.e2e_ms))
    auto = next(filter(learns, times), None)
    fixed = [setting for setting in times if not learns(setting)]
    prompts = sorted(set.intersection(*(set(times[setting]) for setting in times))) if times else []
    if auto is None or not fixed or len(prompts) < 2:
        return None

    def speed(setting: str, half: Sequence[str]) -> float:
        if setting == PLAIN:
            return 1.0
        plain, mine = np.sum([np.mean(times[setting][prompt], axis=0) for prompt in half], axis=0)
        return float(plain / mine)

    halves = (prompts[::2], prompts[1::2])
    chosen = [max((PLAIN, *fixed), key=lambda setting: speed(setting, half)) for half in halves]
    scored = list(zip(chosen, reversed(halves), strict=True))
    return BesideFixed(
        (chosen[0], chosen[1]),
        geometric_mean(speed(setting, half) for setting, half in scored),
        geometric_mean(speed(auto, half) for _, half in scored),
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    return math.exp(float(np.mean([math.log(ratio) for ratio in ratios])))


def by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    return _grouped(rows, lambda row: row.cell)


def _grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    found: defaultdict[K, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)
