"""SVG by hand: elements, scales and axes. Colours are classes, so that the style sheet has light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_CHARACTER = 6.4  # mean width at 12 pixels


class Svg:
    """A drawing that scales with its page. `label` is what a screen reader says."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        self._parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{kind}"/>')

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, *, title: str = "", radius: float = 2
    ) -> None:
        """A rectangle, with a tooltip."""
        shape = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(0, width))}" height="{_n(height)}" rx="{_n(radius)}"'
        self._parts.append(f'<rect {shape} class="{kind}">{_title(title)}</rect>')

    def circle(self, x: float, y: float, radius: float, kind: str, *, title: str = "") -> None:
        """A dot, with a tooltip."""
        shape = f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
        self._parts.append(f'<circle {shape} class="{kind}">{_title(title)}</circle>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        if len(points) > 1:
            self._parts.append(f'<polyline points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}" class="{kind}"/>')

    def curve(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A curve that leaves and arrives horizontally."""
        middle = (x1 + x2) / 2
        shape = f"M{_n(x1)},{_n(y1)} C{_n(middle)},{_n(y1)} {_n(middle)},{_n(y2)} {_n(x2)},{_n(y2)}"
        self._parts.append(f'<path d="{shape}" class="{kind}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text; `y` is its baseline."""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" class="{kind}">{escape(text, quote=False)}</text>'
        )

    def render(self, *, fixed: bool = False) -> str:
        """The element, as wide as its page has room; `fixed`: as wide as it was drawn."""
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        size += f' style="width:{_n(self.width)}px"' if fixed else ""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self._label)}">'
        return "".join([head, *self._parts, "</svg>"])


class Scale:
    """From values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self._start + part * (self._end - self._start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within the range."""
        rough = (self.high - self.low) / max(1, count)
        base = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
        step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        found = [round((first + i) * step, 10) for i in range(4 * count)]
        return [value for value in found if value <= self.high * (1 + 1e-9)]


def width_of(text: str) -> float:
    """About how wide a text is."""
    return _CHARACTER * len(text)


def shown(value: float) -> str:
    """A number without needless digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _title(text: str) -> str:
    return f"<title>{escape(text, quote=False)}</title>" if text else ""
