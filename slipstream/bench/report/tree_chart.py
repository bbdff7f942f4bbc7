"""A drafted tree with its accepted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.bench.report.svg import Svg, width_of

_ROW, _BOX, _GAP = 30, 22, 34
_LONGEST = 16  # characters of a token


def token_tree(tree: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """Levels from left to right; accepted nodes are filled, rejected ones are outlines."""
    tokens = [_spelled(token) for token in tree["tokens"]]
    parents: list[int] = tree["parents"]
    children: dict[int, list[int]] = {node: [] for node in range(len(tokens))}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    accepted = {0, *tree["accepted"]}
    rows = _rows(children, accepted)
    depths = [0] * len(tokens)
    for node in range(1, len(tokens)):
        depths[node] = depths[parents[node]] + 1
    own = None if tree["own"] is None else _spelled(tree["own"])
    last = max(accepted, key=lambda node: depths[node])
    widths = [0.0] * (max(depths) + 2)
    for node, token in enumerate(tokens):
        widths[depths[node]] = max(widths[depths[node]], width_of(token) + 16)
    if own is not None:
        widths[depths[last] + 1] = max(widths[depths[last] + 1], width_of(own) + 16)
    starts = [12.0]
    for width in widths:
        starts.append(starts[-1] + width + _GAP)
    free = max(rows.values()) + 1 if own is not None and children[last] else None
    own_row = rows[last] if free is None else free
    height = 16 + _ROW * (max(max(rows.values()), own_row if own is not None else 0) + 1)
    svg = Svg(starts[-1], height, "A drafted tree; the accepted path is filled")

    def middle(row: float) -> float:
        return 8 + _ROW * row + _BOX / 2

    for node in range(1, len(tokens)):
        parent = parents[node]
        kind = "edge taken" if node in accepted else "edge"
        right = starts[depths[parent]] + width_of(tokens[parent]) + 16
        svg.curve(right, middle(rows[parent]), starts[depths[node]], middle(rows[node]), kind)
    if own is not None:
        right = starts[depths[last]] + width_of(tokens[last]) + 16
        svg.curve(right, middle(rows[last]), starts[depths[last] + 1], middle(own_row), "edge taken")
    for node, token in enumerate(tokens):
        origin = tree["origins"][node] or ""
        x, y = starts[depths[node]], middle(rows[node]) - _BOX / 2
        kind = "root" if node == 0 else f"{kinds.get(origin, 'plain')} {'fill' if node in accepted else 'outline'}"
        told = f"{origin}, joint probability {tree['confidence'][node]:.2f}" if node else "the last token before"
        svg.rect(x, y, width_of(token) + 16, _BOX, f"node {kind}", title=told, radius=5)
        svg.text(x + 8, y + 15, token, "token on" if node in accepted and node else "token")
    if own is not None:
        x, y = starts[depths[last] + 1], middle(own_row) - _BOX / 2
        svg.rect(x, y, width_of(own) + 16, _BOX, "node own", title="the model's own token", radius=5)
        svg.text(x + 8, y + 15, own, "token strong")
    return svg.render(fixed=True)


def _rows(children: Mapping[int, list[int]], accepted: set[int]) -> dict[int, int]:
    """A row for each node: a node is beside its first child, accepted children come first."""
    rows: dict[int, int] = {}
    taken = 0

    def place(node: int) -> None:
        nonlocal taken
        rows[node] = taken
        for number, child in enumerate(sorted(children[node], key=lambda c: c not in accepted)):
            taken += number > 0
            place(child)

    place(0)
    return rows


def _spelled(token: str) -> str:
    """A token with its white space visible."""
    text = token.replace("\n", "⏎").replace("\t", "⇥")
    text = f"␣{text[1:]}" if text.startswith(" ") else text
    return (text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…") or "∅"
