"""Sections about sweeps: tree sizes, batches, contexts, temperatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slipstream.bench.condition_table import ALL
from slipstream.bench.report import charts
from slipstream.bench.report.charts import Point, Series
from slipstream.bench.schedule import PLAIN

Json = Mapping[str, Any]
Section = Callable[[str, str, str], str]

_AXES = {"batch": "requests at once", "context": "tokens of context", "temperature": "temperature"}


def sweep_sections(
    conditions: Sequence[Json], series: Sequence[Series], *, section: Section, legend: Callable[..., str]
) -> Iterator[str]:
    """One section with a chart for each sweep that was measured."""
    figures = []
    for name, axis in _AXES.items():
        found = charts.sweep(_points(conditions, series, name, _speedup), series, axis, "x", one=True)
        if found:
            figures.append(f"<figure><h3>Speed-up over {axis}</h3>{found}</figure>")
    everyone = [Series(PLAIN, "s0"), *series]
    throughput = charts.sweep(_points(conditions, everyone, "batch", _tok_s), everyone, _AXES["batch"], "tok/s")
    if throughput:
        figures.insert(1, f"<figure><h3>Tokens per second over {_AXES['batch']}</h3>{throughput}</figure>")
    if figures:
        told = "Each chart changes one thing and leaves the rest as it is. Bars are 95% intervals."
        yield section("Under other conditions", told, f'<div class="pair">{"".join(figures)}</div>' + legend(everyone))
    own = {each.name: point for each in series if (point := _by_itself(conditions[0], each.name)) is not None}
    trees = charts.sweep(
        _points(conditions, series, "nodes", _per_ms), series, "nodes of a tree", "tokens per ms", own=own
    )
    if trees:
        told = (
            "Larger trees bring more tokens per step, and each step costs more. Tokens per millisecond of decoding are "
            "what counts. Rings: the mean size that a setting took by itself, as a policy decides in every step, and "
            "what that gave."
        )
        steps = charts.sweep(
            _points(conditions, series, "nodes", _per_step), series, "nodes of a tree", "tokens per step"
        )
        both = (
            f"<figure><h3>Tokens per millisecond</h3>{trees}</figure><figure><h3>Tokens per step</h3>{steps}</figure>"
        )
        yield section("Tree size", told, f'<div class="pair">{both}</div>' + legend(series))


def _points(
    conditions: Sequence[Json], series: Sequence[Series], name: str, read: Callable[[Json], Sequence[float | None]]
) -> dict[str, list[Point]]:
    """The values of conditions that differ from the base in `name` alone, in order."""
    base = conditions[0]["condition"]
    chosen = [each for each in conditions if all(each["condition"][key] == base[key] for key in base if key != name)]
    chosen = [each for each in chosen if each["condition"][name] is not None]
    chosen.sort(key=lambda each: each["condition"][name])
    return {
        one.name: [
            Point(f"{each['condition'][name]:g}", read(total))
            for each in chosen
            if (total := each["figures"].get(one.name, {}).get(ALL)) is not None
        ]
        for one in series
    }


def _by_itself(base: Json, setting: str) -> tuple[float, float] | None:
    """The mean tree size of a setting without a given size, steps without a draft included, and its tokens per ms."""
    total = base["figures"].get(setting, {}).get(ALL)
    if total is None or base["condition"]["nodes"] is not None or not total["step_ms"]:
        return None
    return total["rows_per_step"] - 1, total["tokens_per_step"] / total["step_ms"]["total"]


def _speedup(total: Json) -> Sequence[float | None]:
    found: Sequence[float | None] = total["speedup"]
    return found


def _tok_s(total: Json) -> Sequence[float | None]:
    return [total["tok_s"][0], None, None]  # prompts differ in it: an interval would say little about a sweep


def _per_ms(total: Json) -> Sequence[float | None]:
    step = total["step_ms"]
    return [total["tokens_per_step"] / step["total"] if step else 0.0, None, None]


def _per_step(total: Json) -> Sequence[float | None]:
    return [total["tokens_per_step"], None, None]
