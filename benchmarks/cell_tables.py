"""Tables of `cell_figures.py`: every cell, everything pooled, and `auto` beside the best fixed setting."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.cell_figures import (
    LEAST,
    LEAST_LOW,
    MOST_TTFT,
    MOST_WIDTH,
    Figure,
    beside_fixed,
    by_cell,
    figure,
    geometric_mean,
)
from benchmarks.cells import LIBRARY, Row, learns

_LEAST_POOLED = 1.0
_LEAST_OF_FIXED = 0.95
_ALL = "all"
_NAMES = ("weights", "batch", "T", "kind")
_COLUMNS = (*_NAMES, "speed-up", "timing", "prompts", "TTFT", "of medians", "tok/s", "throughput", "rounds")


def show(rows: Sequence[Row]) -> None:
    """All tables."""
    if not rows:
        print("nothing was measured")
        return
    for setting in dict.fromkeys(row.setting for row in rows if learns(row.setting)):
        _cells(setting, [row for row in rows if row.setting == setting])
    _fixed(rows)


def _cells(setting: str, rows: Sequence[Row]) -> None:
    """Cell by cell against the criteria, then pooled."""
    print(f"`{setting}` over plain decoding. A cell passes with a speed-up of at least {LEAST}, a lower end of the")
    print(f"timing interval of at least {LEAST_LOW}, a TTFT of at most {MOST_TTFT}, and the same texts.\n")
    print(f"| {' | '.join(_COLUMNS)} | |")
    print("| --- | ---: | ---: | --- |" + " ---: |" * (len(_COLUMNS) - 4) + " --- |")
    found = {}
    for cell, listed in sorted(by_cell(rows).items()):
        peers = [row for row in rows if row.cell[:2] == cell[:2]]
        found[cell] = figure(listed, peers)
        verdict = ", ".join(found[cell].misses) or "pass"
        _line((cell.weights, str(cell.batch), f"{cell.temperature:g}", cell.kind), listed, found[cell], verdict)
    pooled: defaultdict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        pooled[row.weights, str(row.batch), f"{row.temperature:g}", _ALL].append(row)
        pooled[row.weights, str(row.batch), _ALL, _ALL].append(row)
        if not row.weights.endswith(LIBRARY):
            pooled[_ALL, str(row.batch), _ALL, _ALL].append(row)
    for names, listed in sorted(pooled.items(), key=lambda entry: (entry[0][0] == _ALL, entry[0])):
        over_all = figure(listed)
        rated = "" if names[0] != _ALL else "pass" if over_all.value >= _LEAST_POOLED else f"under {_LEAST_POOLED:g}"
        _line(names, listed, over_all, rated)
    misses = Counter(name for one in found.values() for name in one.misses)
    missed = "".join(f", {name} {count}" for name, count in misses.items())
    wide = sum(one.timing is not None and one.timing > MOST_WIDTH for one in found.values())
    print(f"\n{sum(not one.misses for one in found.values())} of {len(found)} cells pass{missed}")
    print(f"timing intervals wider than ±{100 * MOST_WIDTH:g}%: {wide}")
    worst = min(found, key=lambda cell: found[cell].value)
    print(f"worst cell: {found[worst].value:.3f}x, {' '.join(map(str, worst))}\n")


def _line(names: tuple[str, ...], rows: Sequence[Row], found: Figure, verdict: str) -> None:
    timing = "" if found.timing is None else f"±{100 * found.timing:.1f}%"
    prompts = "" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"
    first = f"{found.ttft:.3f} | {found.ttft_medians:.3f}"
    rate = f"{found.tokens_per_second:.0f} | {found.throughput:.3f}x"
    rounds = len({row.round for row in rows})
    figures = f"{found.value:.3f}x | {timing} | {prompts} | {first} | {rate} | {rounds}"
    print(f"| {' | '.join(names)} | {figures} | {verdict} |")


def _fixed(rows: Sequence[Row]) -> None:
    """`auto` beside fixed settings, each cell for itself."""
    settings = [setting for setting in dict.fromkeys(row.setting for row in rows) if not learns(setting)]
    scored = {cell: beside_fixed(listed) for cell, listed in sorted(by_cell(rows).items())}
    if not any(scored.values()):
        return
    print("The best fixed setting, plain decoding among them, is chosen on one half of a cell's prompts and scored on")
    print("the other, beside `auto` on that half; both ways, geometric means.\n")
    named = " | ".join(f"`{setting}`" for setting in settings)
    print(f"| weights | T | kind | {named} | chosen on A, on B | scored | `auto` | ratio |")
    print("| --- | ---: | --- |" + " ---: |" * len(settings) + " --- | ---: | ---: | ---: |")
    for cell, found in scored.items():
        if found is not None:
            of_cell = [[row for row in rows if (row.cell, row.setting) == (cell, setting)] for setting in settings]
            speeds = " | ".join(_speed(listed) for listed in of_cell)
            scores = f"{found.fixed:.3f}x | {found.auto:.3f}x | {found.ratio:.3f}"
            chosen = ", ".join(f"`{setting}`" for setting in found.chosen)
            print(f"| {cell.weights} | {cell.temperature:g} | {cell.kind} | {speeds} | {chosen} | {scores} |")
    average = geometric_mean(found.ratio for found in scored.values() if found is not None)
    print(f"\n`auto` over the best fixed setting, average of the cells: {average:.3f}", end=" ")
    print("(pass)" if average >= _LEAST_OF_FIXED else f"(under {_LEAST_OF_FIXED})")


def _speed(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    found = figure(rows)
    return f"{found.value:.2f}x" + ("" if found.identical else " texts differ!")
