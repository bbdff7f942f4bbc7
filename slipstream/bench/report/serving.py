"""The report of a server: latency and throughput over load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from slipstream.bench.report import charts
from slipstream.bench.report.charts import Point, Series

Json = Mapping[str, Any]

_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Gap between chunks",
    "e2el": "End to end",
}


def server_sections(results: Json) -> Iterator[str]:
    """The sections of a report."""
    points = results["points"]
    best = max(points, key=lambda point: point["output_throughput"])
    name = escape(results["model"]["name"])
    tiles = [
        (f"{best['output_throughput']:.0f} tok/s", f"at {best['load']}"),
        (
            f"{best['request_throughput']:.2f} req/s",
            f"{sum(p['completed'] for p in points)} answers, {sum(p['failed'] for p in points)} failed",
        ),
        (f"{points[0]['median_ttft_ms']:.0f} ms", f"median time to first token at {points[0]['load']}"),
        (f"{points[0]['median_tpot_ms']:.1f} ms", f"median time per output token at {points[0]['load']}"),
    ]
    good = [point for point in points if point["request_goodput"] is not None]
    if good:
        top = max(good, key=lambda point: point["request_goodput"])
        levels = ", ".join(f"{key} {limit:g} ms" for key, limit in results.get("goodput", {}).items())
        tiles.append((f"{top['request_goodput']:.2f} req/s", f"goodput within {levels}, at {top['load']}"))
    boxes = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(t)}</span></div>' for v, t in tiles)
    yield f'<h1>{name} under load</h1><p class="soft">{escape(str(results["url"]))}</p><div class="hero">{boxes}</div>'
    yield _table(points)
    if len(points) > 1:
        yield _curves(points)
    panels = "".join(
        f"<figure><h3>{title}, ms</h3>{_percentiles(points, key)}</figure>" for key, title in _NAMES.items()
    )
    told = "The large dot is the median; smaller ones are the 90th, 95th and 99th percentiles."
    yield f'<section><h2>Latency percentiles</h2><p class="soft">{told}</p><div class="pair">{panels}</div></section>'


def _percentiles(points: Sequence[Json], key: str) -> str:
    rows = [
        (Series(point["load"], f"s{1 + number % 5}"), {f"p{p}": point[f"p{p}_{key}_ms"] for p in (50, 90, 95, 99)})
        for number, point in enumerate(points)
    ]
    return charts.latencies(_NAMES[key], rows)


def _curves(points: Sequence[Json]) -> str:
    loads = Series("all requests", "s1")
    labels = [point["load"].split(" ", 1)[1] for point in points]
    axis = str(points[0]["load"]).split(" ", 1)[0]

    def over(key: str) -> dict[str, list[Point]]:
        return {loads.name: [Point(label, [p[key], None, None]) for label, p in zip(labels, points, strict=True)]}

    drawn = [
        ("Tokens per second", charts.sweep(over("output_throughput"), [loads], axis, "tok/s")),
        ("Median time per output token, ms", charts.sweep(over("median_tpot_ms"), [loads], axis, "ms")),
    ]
    figures = "".join(f"<figure><h3>{title}</h3>{svg}</figure>" for title, svg in drawn if svg)
    return f'<section><h2>Over load</h2><div class="pair">{figures}</div></section>'


def _table(points: Sequence[Json]) -> str:
    heads = [
        "load",
        "answers",
        "failed",
        "req/s",
        "tok/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "ITL p50",
        "p99",
        "E2E p50",
        "p99",
    ]
    rows = []
    for point in points:
        latencies = [f"{point[f'p{p}_{key}_ms']:.1f}" for key in _NAMES for p in (50, 99)]
        cells = [point["load"], point["completed"], point["failed"], f"{point['request_throughput']:.2f}"]
        cells += [f"{point['output_throughput']:.1f}", *latencies]
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    cpu = max(point["client_cpu_percent"] for point in points)
    return (
        f'<section><h2>Figures</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        f'<p class="note">Times in ms. The client took {cpu:.1f}% of a core at most.</p></section>'
    )
