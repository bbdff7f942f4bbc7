"""The charts of a report. Each takes figures and returns an SVG element, or an empty string without figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.bench.report.svg import Scale, Svg, shown, width_of

Json = Mapping[str, Any]
Bounds = Sequence[float | None]  # value, low, high

_BAR = 15
_FULL, _HALF = 1000, 490


def _wide(svg: Svg) -> str:
    """A drawing that a phone scrolls, so that its text can be read."""
    return f'<div class="scroll wide">{svg.render()}</div>'


class Series(NamedTuple):
    """A setting and the class of its colour."""

    name: str
    kind: str


class Point(NamedTuple):
    """A value over a label, with its interval."""

    label: str
    bounds: Bounds
    note: str = ""


def speedups(rows: Sequence[tuple[str, Sequence[Bounds]]], series: Sequence[Series]) -> str:
    """Bars by category, with intervals; a line at 1x."""
    if not rows:
        return ""
    left = 24 + max(width_of(name) for name, _ in rows)
    gap, top = 12, 8
    height = top + len(rows) * (len(series) * _BAR + gap) + 26
    most = max(b[0] or 1.0 for _, bounds in rows for b in bounds)
    highest = max(most, *(min(b[2] or 0.0, 1.5 * most) for _, bounds in rows for b in bounds))  # few prompts: wide ones
    svg = Svg(_FULL, height, "Speed-up over plain decoding by category")
    x = Scale(0, max(1.5, highest) * 1.02, left, _FULL - 120)
    for tick in x.ticks(6):
        svg.line(x(tick), top, x(tick), height - 22, "grid")
        svg.text(x(tick), height - 6, f"{tick:g}x", "axis", "middle")
    y = float(top)
    for number, (name, bounds) in enumerate(rows):
        middle = y + len(series) * _BAR / 2 + 4
        svg.text(left - 10, middle, name, "label strong" if number == 0 else "label", "end")
        for each, (value, low, high) in zip(series, bounds, strict=True):
            assert value is not None
            span = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
            svg.rect(
                x(0), y + 1.5, x(value) - x(0), _BAR - 3, f"fill {each.kind}", title=f"{each.name}: {value:.2f}x{span}"
            )
            end = x(value)
            if low is not None and high is not None:
                end = x(high)
                svg.line(x(low), y + _BAR / 2, end, y + _BAR / 2, "whisker")
                for bound in (low, high) if high <= x.high else (low,):
                    svg.line(x(bound), y + 4, x(bound), y + _BAR - 4, "whisker")
                if high > x.high:  # it goes on: an arrow, and where it ends
                    svg.text(end + 50, y + _BAR - 4, f"to {high:.1f}x", "axis")
                    for side in (-3, 3):
                        svg.line(end - 5, y + _BAR / 2 + side, end, y + _BAR / 2, "whisker")
            svg.text(end + 6, y + _BAR - 4, f"{value:.2f}x", "value")
            y += _BAR
        y += gap
        if number == 0:
            svg.line(8, y - gap / 2, _FULL - 8, y - gap / 2, "rule")
    svg.line(x(1), top - 4, x(1), height - 22, "one")
    return _wide(svg)


def by_depth(
    joint: Mapping[str, Sequence[float]], given: Mapping[str, Sequence[float]], series: Sequence[Series]
) -> str:
    """Accepted nodes by depth: of all steps that drafted (solid), and of those that got so far (dashed)."""
    deepest = min(12, max((_depth(joint[s.name]) for s in series), default=0))
    if deepest < 2:
        return ""
    svg, x, y = _frame(deepest, "Acceptance by depth")
    for tick in (0, 25, 50, 75, 100):
        svg.line(x(1) - 12, y(tick), _HALF - 8, y(tick), "grid")
        svg.text(x(1) - 18, y(tick) + 4, f"{tick}%", "axis", "end")
    for depth in range(1, deepest + 1):
        svg.text(x(depth), y(0) + 18, str(depth), "axis", "middle")
    svg.text((x(1) + x(deepest)) / 2, y(0) + 36, "depth of the drafted token", "axis", "middle")
    for each in series:
        for values, style in ((given[each.name], "dashed"), (joint[each.name], "")):
            points = [(x(d + 1), y(100 * value)) for d, value in enumerate(values[:deepest])]
            svg.path(points, f"stroke {each.kind} {style}")
            for (px, py), value in zip(points, values, strict=False):
                what = "given the one before" if style else "of all drafting steps"
                svg.circle(px, py, 3.2, f"fill {each.kind}", title=f"{each.name}: {100 * value:.0f}% {what}")
    return svg.render()


def _frame(deepest: int, label: str) -> tuple[Svg, Scale, Scale]:
    svg = Svg(_HALF, 280, label)
    return svg, Scale(1, deepest, 62, _HALF - 20), Scale(0, 100, 232, 12)


def _depth(values: Sequence[float]) -> int:
    """Levels that were accepted in at least one of a hundred steps."""
    return sum(value >= 0.01 for value in values)


def sweep(
    points: Mapping[str, Sequence[Point]],
    series: Sequence[Series],
    axis: str,
    unit: str,
    *,
    one: bool = False,
    own: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Values over the values of a sweep, with intervals; `one`: with a line at 1.

    `own`: the size that each setting chose by itself, and its value; a ring, placed between the labels by logarithm.
    """
    drawn = [each for each in series if points.get(each.name)]
    if not drawn or max(len(points[each.name]) for each in drawn) < 2:
        return ""
    labels = [point.label for point in points[drawn[0].name]]
    most = max(b[0] or 0.0 for each in drawn for _, b, _ in points[each.name])
    tops = [
        min(b[2] or 0.0, 2 * most) for each in drawn for _, b, _ in points[each.name]
    ]  # few prompts: wide intervals
    most = max(most, *(value for _, value in (own or {}).values()), 0.0)
    svg = Svg(_HALF, 280, f"{unit} over {axis}")
    x, y = Scale(0, len(labels) - 1, 84, _HALF - 50), Scale(0, max(most, *tops) * 1.08, 232, 12)
    for tick in y.ticks(5):
        svg.line(58, y(tick), _HALF - 8, y(tick), "grid")
        svg.text(52, y(tick) + 4, f"{shown(tick)}{unit if unit == 'x' else ''}", "axis", "end")
    for number, label in enumerate(labels):
        svg.text(x(number), 250, label, "axis", "middle")
    svg.text((x(0) + x(len(labels) - 1)) / 2, 270, axis, "axis", "middle")
    if one:
        svg.line(58, y(1), _HALF - 8, y(1), "one")
    for place, each in enumerate(drawn):
        shift = 5 * (place - (len(drawn) - 1) / 2)  # so that intervals do not cover each other
        spots = []
        for number, (_, (value, low, high), note) in enumerate(points[each.name]):
            assert value is not None
            spots.append((x(number) + shift, y(value)))
            if low is not None and high is not None:
                svg.line(spots[-1][0], y(low), spots[-1][0], y(high), f"stroke thin {each.kind}")
            svg.circle(*spots[-1], 4, f"fill {each.kind}", title=f"{each.name}: {value:.3g} {unit}")
            if note:
                svg.text(spots[-1][0], spots[-1][1] - 10, note, "axis", "middle")
        svg.path(spots, f"stroke {each.kind}")
        if own is not None and each.name in own:
            at, value = own[each.name]
            place_of_own = np.interp(np.log1p(at), np.log1p([float(label) for label in labels]), range(len(labels)))
            told = f"{each.name} by itself: {at:.1f} {axis}, {value:.3g} {unit}"
            svg.circle(x(float(place_of_own)), y(value), 7, f"stroke {each.kind}", title=told)
    return svg.render()


def time_split(rows: Sequence[tuple[str, Mapping[str, float]]], parts: Sequence[tuple[str, str]]) -> str:
    """Milliseconds per token as stacked bars; `parts`: names and the classes of their colours."""
    if not rows:
        return ""
    left = 20 + max(width_of(name) for name, _ in rows)
    height = 10 + 34 * len(rows) + 26
    svg = Svg(_FULL, height, "Milliseconds per token by what they are spent on")
    x = Scale(0, max(sum(each.values()) for _, each in rows) * 1.02, left, _FULL - 90)
    for tick in x.ticks(8):
        svg.line(x(tick), 6, x(tick), height - 22, "grid")
        svg.text(x(tick), height - 6, f"{tick:g} ms", "axis", "middle")
    for number, (name, each) in enumerate(rows):
        y, at = 10 + 34 * number, 0.0
        svg.text(left - 10, y + 16, name, "label", "end")
        for part, kind in parts:
            ms = each.get(part, 0.0)
            svg.rect(x(at), y, x(at + ms) - x(at), 22, f"fill {kind}", title=f"{part}: {ms:.2f} ms per token", radius=0)
            at += ms
        svg.text(x(at) + 6, y + 16, f"{at:.1f} ms", "value")
    return _wide(svg)


def latencies(metric: str, rows: Sequence[tuple[Series, Json | None]]) -> str:
    """The range from the median to the 99th percentile of each setting."""
    known = [(each, found) for each, found in rows if found]
    if not known:
        return ""
    left = 16 + max(width_of(each.name) for each, _ in known)
    height = 14 + 30 * len(known) + 24
    svg = Svg(_HALF, height, f"{metric}: percentiles")
    x = Scale(0, max(found["p99"] for _, found in known) * 1.05, left, _HALF - 30)
    for tick in x.ticks(4):
        svg.line(x(tick), 6, x(tick), height - 22, "grid")
        svg.text(x(tick), height - 6, shown(tick), "axis", "middle")
    for number, (each, found) in enumerate(known):
        y = 20 + 30 * number
        svg.text(left - 10, y + 4, each.name, "label", "end")
        svg.line(x(found["p50"]), y, x(found["p99"]), y, f"stroke wide {each.kind}")
        for point, radius in (("p50", 6.0), ("p90", 4.0), ("p95", 3.4), ("p99", 3.0)):
            svg.circle(
                x(found[point]), y, radius, f"fill {each.kind}", title=f"{each.name} {point}: {found[point]:.1f} ms"
            )
    return svg.render()


def decisions(steps: Sequence[Json], kinds: Mapping[str, str]) -> str:
    """What the policy decided over an answer: a bar per step, as high as the nodes verified and the tokens emitted."""
    if not steps:
        return ""
    height, base = 190, 140
    svg = Svg(_FULL, height, "Decisions of the policy, step by step")
    width = min(16.0, (_FULL - 80) / len(steps))
    y = Scale(0, max(1, *(max(each["nodes"], each["tokens"]) for each in steps)), base, 16)
    for tick in y.ticks(4):
        svg.line(46, y(tick), _FULL - 10, y(tick), "grid")
        svg.text(40, y(tick) + 4, f"{tick:g}", "axis", "end")
    for number, each in enumerate(steps):
        x = 50 + number * width
        kind = kinds.get("+".join(each["drafters"]), "plain")
        if each["drafters"]:
            svg.rect(
                x,
                y(each["nodes"]),
                width - 1.5,
                base - y(each["nodes"]),
                f"fill faint {kind}",
                title=each["reason"],
                radius=1,
            )
        svg.rect(
            x, y(each["tokens"]), width - 1.5, base - y(each["tokens"]), f"fill {kind}", title=each["reason"], radius=1
        )
        if each["probe"]:
            svg.circle(x + width / 2, base + 10, 2.4, "fill probe", title="a probe")
    svg.text(50, base + 34, "steps of the answer: pale, nodes verified; full, tokens emitted; dots, probes", "axis")
    return _wide(svg)
