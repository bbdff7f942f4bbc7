"""What passes and drafts cost on a machine: a table of measured points, and the milliseconds between them.

    pass_ms: [rows, sequences, context, ms]   a pass of the target over so many rows of so many sequences
    draft_ms: {drafter: [[nodes, sequences, ms], ...]}   a proposal for all sequences
    other_ms: [[sequences, ms], ...]   the rest of a step: scheduling, emitting

A pass costs R(rows) + s * sequences + a * sequences * context + b * rows * context: weights and GEMMs by rows, what is
done for each sequence, reading K/V, attention. R is known at the measured numbers of rows and linear between them; all
is fitted together by least squares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import CorruptFile, OptionError

FORMAT, VERSION = "slipstream-costs", 1
PLAIN, _POLICY = "none", "auto"
_BEYOND = 1.5  # times the longest context that was measured

Json = dict[str, Any]


@dataclass
class CostTable:
    """Measured points, and the fit through them."""

    pass_ms: list[tuple[int, int, int, float]]  # rows, sequences, context, milliseconds
    draft_ms: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)  # nodes, sequences, milliseconds
    other_ms: list[tuple[int, float]] = field(default_factory=list)  # sequences, milliseconds
    machine: str = ""
    command: str = ""  # that measured it
    prompt_rows: int = 512  # of all prompts in one pass, at most
    prompt_row: float = 1.0  # what a row of a prompt costs, in rows of trees
    rounds: bool = False  # steps run on the device in bursts (docs/gpu.md)

    def __post_init__(self) -> None:
        if not self.pass_ms:
            raise CorruptFile("a table of costs has no passes")
        self._knots = np.array(sorted({rows for rows, *_ in self.pass_ms}), float)
        self._fit()

    def _fit(self) -> None:
        """R at each measured number of rows, and the costs of sequences and context, none of them negative."""
        points = np.array(self.pass_ms, float)
        rows, sequences, context, ms = points.T
        place = np.searchsorted(self._knots, rows)
        basis = np.zeros((len(points), len(self._knots) + 3))
        basis[np.arange(len(points)), place] = 1.0
        basis[:, -3], basis[:, -2], basis[:, -1] = sequences, sequences * context, rows * context
        kept = np.ones(basis.shape[1], bool)
        # A cost that the points do not tell apart from R, or that noise makes negative, is left out.
        kept[-3] = len({(r, s) for r, s, *_ in self.pass_ms}) > len(self._knots)
        kept[-2:] = len(np.unique(context)) > 1
        while True:
            # Relative errors count: a pass of 4 ms is not to be fitted at the expense of one of 400.
            found, *_ = np.linalg.lstsq(basis[:, kept] / ms[:, None], np.ones(len(ms)), rcond=None)
            whole = np.zeros(basis.shape[1])
            whole[kept] = found
            negative = [index for index in (-3, -2, -1) if whole[index] < 0]
            if not negative:
                break
            kept[min(negative, key=lambda index: whole[index] * basis[:, index].max())] = False
        self._by_rows = _rising(np.maximum(whole[:-3], 0.0).tolist(), np.bincount(place).tolist())
        self._a_sequence, self._by_sequence, self._by_row = map(float, whole[-3:])

    def a_pass(self, rows: float, sequences: int, context: float) -> float:
        """Milliseconds of a pass."""
        by_context = self._by_sequence * sequences + self._by_row * rows
        return self._r(rows) + self._a_sequence * sequences + context * by_context

    def _r(self, rows: float) -> float:
        knots, values = self._knots, self._by_rows
        if rows <= knots[-1] or len(knots) == 1:
            return float(np.interp(rows, knots, values))
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        return float(values[-1] + slope * (rows - knots[-1]))

    def a_draft(self, drafter: str, nodes: float, sequences: int) -> float:
        """Milliseconds of a proposal of about so many nodes for each sequence. A drafter without points is refused."""
        if drafter == PLAIN:
            return 0.0
        points = self._points(drafter)
        near = min(points, key=lambda p: (abs(np.log(p[1] / sequences)), abs(np.log((1 + p[0]) / (1 + nodes)))))
        alike = sorted((n, ms) for n, s, ms in points if s == near[1])
        ms = float(np.interp(nodes, [n for n, _ in alike], [ms for _, ms in alike]))
        if near[1] == sequences:
            return ms
        # A draft of one layer over n sequences costs what the target's pass does, in proportion.
        return ms * self._r(sequences * (1 + nodes)) / self._r(near[1] * (1 + nodes))

    def _points(self, drafter: str) -> list[tuple[int, int, float]]:
        for name in (drafter, drafter.partition(":")[0]):
            if name in self.draft_ms:
                return self.draft_ms[name]
        known = ", ".join(self.draft_ms) or "none"
        raise OptionError(f"the table of costs does not have {drafter}", hint=f"it has: {known}")

    def drafting(self, setting: str, drafters: Sequence[str]) -> str:
        """The entry for a setting; for one that picks among `drafters`, as `auto` does, the least that has them all."""
        method = setting.partition(":")[0]
        if method != _POLICY or setting in self.draft_ms or method in self.draft_ms or not drafters:
            return setting
        whole = [name for name in self.draft_ms if {*drafters} <= {*name.split("+")}]
        return min(whole, key=lambda name: name.count("+"), default="+".join(drafters))

    def other(self, sequences: int) -> float:
        """Milliseconds of the rest of a step."""
        if not self.other_ms:
            return 0.0
        known = sorted(self.other_ms)
        return float(np.interp(sequences, [s for s, _ in known], [ms for _, ms in known]))

    def covers(self, rows: float, sequences: int, context: float) -> bool:
        """Whether a pass lies within what was measured; outside, its cost is a continuation of the fit."""
        points = np.array(self.pass_ms, float)
        most_rows, most_sequences, longest, _ = points.max(axis=0)
        read = sequences * context <= _BEYOND * (points[:, 1] * points[:, 2]).max()  # K/V of all sequences
        return bool(rows <= most_rows and sequences <= most_sequences and context <= _BEYOND * longest and read)

    def as_dict(self) -> Json:
        """Plain data."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "machine": self.machine,
            "command": self.command,
            "pass_ms": [list(point) for point in self.pass_ms],
            "draft_ms": {name: [list(point) for point in points] for name, points in self.draft_ms.items()},
            "other_ms": [list(point) for point in self.other_ms],
            "prompt_rows": self.prompt_rows,
            "prompt_row": self.prompt_row,
            "rounds": self.rounds,
        }


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Isotonic regression: the nearest non-decreasing sequence, in which neighbours that decrease get their mean."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, much, some), (other, more, others) = pools[-2:]
            pools[-2:] = [((one * much + other * more) / (much + more), much + more, some + others)]
    return [value for value, _, count in pools for _ in range(count)]


def shipped() -> list[str]:
    """Names of the tables that come with the package."""
    folder = files("slipstream.bench") / "costs"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def load_costs(name: str) -> CostTable:
    """A shipped table by its name, or one from a file."""
    if name in shipped():
        text = (files("slipstream.bench") / "costs" / f"{name}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            known = f"a file, or one of: {', '.join(shipped())}"
            raise OptionError(f"--costs {name!r} cannot be read: {error.strerror or error}", hint=known) from None
    try:
        return costs_of(json.JSONDecoder().raw_decode(text.lstrip())[0])  # of traces, the first line
    except ValueError as error:
        raise CorruptFile(f"--costs {name!r} is not a table of costs: {error}") from None


def costs_of(data: Mapping[str, Any]) -> CostTable:
    """A table from plain data: of its own, or the header of traces."""
    if isinstance(data, Mapping) and isinstance(data.get("costs"), Mapping):
        data = data["costs"]
    if not isinstance(data, Mapping) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise CorruptFile("not a table of costs", hint=f"format {FORMAT}, version {VERSION}")
    try:
        return CostTable(
            pass_ms=[(int(r), int(s), int(c), float(ms)) for r, s, c, ms in data["pass_ms"]],
            draft_ms={str(n): [_draft(point) for point in points] for n, points in data.get("draft_ms", {}).items()},
            other_ms=[(int(s), float(ms)) for s, ms in data.get("other_ms", [])],
            machine=str(data.get("machine", "")),
            command=str(data.get("command", "")),
            prompt_rows=int(data.get("prompt_rows", CostTable.prompt_rows)),
            prompt_row=float(data.get("prompt_row", CostTable.prompt_row)),
            rounds=bool(data.get("rounds", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"a table of costs has a wrong entry: {error}") from None


def _draft(point: Sequence[float]) -> tuple[int, int, float]:
    nodes, sequences, ms = point
    return int(nodes), int(sequences), float(ms)
