"""Line plots as SVG text, without a library or script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 860, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 110, 12, 42  # margins; the right one holds the legend
_MOST_POINTS = 400  # of a line: more cannot be seen
_COLOURS = ("#1f6feb", "#d1570a", "#2da44e", "#a475f9", "#bf3989", "#57606a", "#b08800", "#0a7d91")


@dataclass(frozen=True)
class Line:
    """Points (x, y) from left to right, and their name."""

    name: str
    points: Sequence[tuple[float, float]]


def plot(lines: Sequence[Line], x_name: str, y_name: str, top: float | None = None) -> str:
    """The lines in one picture. `top`: end of the y axis (default: the highest point)."""
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p>no points</p>"
    right = max(max(x for x, _ in points), 1e-9)
    lowest = min(y for _, y in points)
    bottom = 0.0 if lowest >= 0 else lowest
    highest = max(y for _, y in points) if top is None else top
    across, up = _ticks(0.0, right), _ticks(bottom, max(highest, bottom + 1e-9))
    right, highest = max(right, across[-1]), max(highest, up[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + width * x / right, _TOP + height * (1 - (y - bottom) / max(highest - bottom, 1e-9))

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-size="12" role="img">']
    for y in up:
        left, level = place(0.0, y)
        parts.append(f'<path d="M{left:.1f} {level:.1f}H{_WIDTH - _RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{level + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in across:
        centre, floor = place(x, bottom)
        parts.append(f'<text x="{centre:.1f}" y="{floor + 18:.1f}" text-anchor="middle">{x:,g}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{escape(x_name)} (across), {escape(y_name)} (up)</text>')
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in _thinned(line.points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        key = _TOP + 14 + 17 * number
        parts.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{key}" fill="{colour}">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [round(step * index, 12) for index in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Means of neighbouring points if there are more than a picture can show."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
