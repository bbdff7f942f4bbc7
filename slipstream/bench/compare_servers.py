"""Compares two results of servers, load by load.

Requests of the two runs are not paired. An interval comes from drawing requests of either run again, and for the
throughput from drawing tenths of its time: it covers chance within these two runs, not what changes between days.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.bench.intervals import Bootstrap, Column, Interval
from slipstream.errors import OptionError

Json = dict[str, Any]

_SLICES = 10  # of a run's time
_FIGURES = (("tok_s", "tok/s", True), ("ttft_ms", "TTFT", False), ("tpot_ms", "TPOT", False))  # whether more is better


def compare_servers(first: Json, second: Json) -> Json:
    """For each load of both runs: throughput, TTFT and TPOT, and how the second's relate to the first's."""
    points = {point["load"]: point for point in second["points"]}
    both = [(point, points[point["load"]]) for point in first["points"] if point["load"] in points]
    if not both:
        loads = [", ".join(point["load"] for point in results["points"]) for results in (first, second)]
        raise OptionError("the two results have no load in common", hint=f"{loads[0]}; {loads[1]}")
    rows = [_load(*pair) for pair in both]
    return {"loads": rows, "notes": [*_notes(first, second), *_failures(both)]}


def _load(first: Json, second: Json) -> Json:
    row: Json = {"load": first["load"], "figures": {}, "verdicts": []}
    values = [_values(point) for point in (first, second)]
    for name, shown, more_is_better in _FIGURES:
        a, b = (each[name] for each in values)
        if not len(a) or not len(b):
            continue
        change = _ratio_of_means(a, b)
        means = round(float(a.mean()), 3), round(float(b.mean()), 3)
        row["figures"][name] = {"first": means[0], "second": means[1], "change": list(change)}
        row["verdicts"].append(_verdict(f"{row['load']}: {shown}", change, more_is_better=more_is_better))
    return row


def _values(point: Json) -> dict[str, Column]:
    """Of requests that succeeded: TTFT and TPOT of each, in ms; tokens per second in each slice of the time."""
    good = [place for place, error in enumerate(point["errors"]) if not error]
    counts = [(place, point["output_lens"][place]) for place in good]
    spans = {place: point["latencies"][place] - point["ttfts"][place] for place in good}
    return {
        "tok_s": _throughput(point, good),
        "ttft_ms": np.array([1000 * point["ttfts"][place] for place in good]),
        "tpot_ms": np.array([1000 * spans[place] / (count - 1) for place, count in counts if count > 1]),
    }


def _throughput(point: Json, good: Sequence[int]) -> Column:
    """Tokens per second in each slice; the tokens of an answer come evenly with its chunks."""
    if not good:
        return np.array([])
    slices: Column = np.zeros(_SLICES)
    began, seconds = min(point["start_times"]), point["duration"] / _SLICES
    for place in good:
        gaps = point["itls"][place]
        times = point["start_times"][place] - began + point["ttfts"][place] + np.cumsum([0.0, *gaps])
        where = np.minimum(times / seconds, _SLICES - 1).astype(int)
        np.add.at(slices, where, point["output_lens"][place] / len(times))
    slices /= seconds
    return slices


def _ratio_of_means(first: Column, second: Column) -> Interval:
    """The second mean over the first; either run is drawn on its own."""
    count = len(first)

    def ratio(weights: Column) -> Column:
        a, b = weights[:, :count], weights[:, count:]
        found: Column = (b @ second / b.sum(axis=1)) / (a @ first / a.sum(axis=1))
        return found

    if min(count, len(second)) < 2:  # nothing is known of how requests of that run differ
        return Interval(float(second.mean() / first.mean()))
    return Bootstrap(["first"] * count + ["second"] * len(second)).interval(ratio)


def _verdict(what: str, change: Interval, *, more_is_better: bool) -> str:
    percent = f"{100 * (change.value - 1):+.1f}%"
    if change.low is None:
        return f"{what}: {percent}, too few requests for a verdict"
    if not change.above_one and not change.below_one:
        return f"{what}: no difference shown ({percent})"
    better = change.above_one == more_is_better
    return f"{what} is {'better' if better else 'worse'} in the second run: {percent}"


def _notes(first: Json, second: Json) -> list[str]:
    """What else differs between the runs."""
    a, b = (
        {"url": each["url"], "model": each["model"]["name"]}
        | {name: each.get("arguments", {}).get(name) for name in ("prompts", "tokens", "requests")}
        for each in (first, second)
    )
    return [f"{name}: {a[name]} and {b[name]}" for name in a if a[name] != b[name]]


def _failures(both: Sequence[tuple[Json, Json]]) -> list[str]:
    """Requests that failed are in no figure."""
    failed = [(a["load"], a["failed"], b["failed"]) for a, b in both]
    return [f"{load}: {one} and {other} requests failed" for load, one, other in failed if one + other]
