"""All figures as one table; missing values are empty cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Found = Mapping[str, list[dict[str, Any]]]  # part -> rows, as in the JSON file
Cells = dict[str, Any]

COLUMNS = {  # and their number formats
    "what": "",
    "batch": "d",
    "context": ",d",
    "nodes": "d",
    "tok/s": ",.1f",
    "over plain": ".2f",
    "tokens per step": ".2f",
    "GB/s": ",.0f",
    "step ms": ".2f",
    "draft ms": ".2f",
    "verify ms": ".2f",
    "rest ms": ".2f",
    "rest": ".1%",
    "worst": ".2f",
    "same as plain": ".0%",
}


def table(found: Found) -> str:
    """The table in Markdown."""
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)]]
    for cells in _rows(found):
        lines.append([_written(cells.get(name), how) for name, how in COLUMNS.items()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(found: Found) -> Iterator[Cells]:
    for row in found.get("floor", ()):
        yield {"what": f"products alone, {row['rows']} rows", "GB/s": row["gb_per_s"], "step ms": row["ms"]}
    for row in (*found.get("steps", ()), *found.get("shapes", ()), *found.get("contexts", ())):
        yield {"what": f"a round: {_short(row['drafter'])}", **_halves(row), **_named(row, "batch", "context", "nodes")}
    plain = _plain(found.get("answers", ()))
    for row in found.get("answers", ()):
        yield {
            "what": f"answers: {_short(row['drafter'])}",
            "batch": 1,
            **_speed(row, plain),
            **_halves(row),
            "rest": None if row["rest_ms"] is None else row["rest_ms"] / row["step_ms"],
            "worst": row["worst"],
            "same as plain": row["same_as_plain"],
        }
    for row in found.get("batches", ()):
        alike = [other for other in found["batches"] if other["batch"] == row["batch"]]
        yield {
            "what": f"throughput: {_short(row['drafter'])}",
            **_named(row, "batch"),
            **_speed(row, _plain(alike)),
            "step ms": row["step_ms"],
        }
    for row in found.get("peers", ()):
        yield {"what": row["name"], "batch": 1, "tok/s": row["tok_s"], "over plain": _over(row["tok_s"], plain)}


def _named(row: Cells, *names: str) -> Cells:
    return {name: row[name] for name in names}


def _speed(row: Cells, plain: float | None) -> Cells:
    return {
        "tok/s": row["tok_s"],
        "over plain": _over(row["tok_s"], plain),
        "tokens per step": row["tokens_per_step"],
        "GB/s": row["gb_per_s"],
    }


def _halves(row: Cells) -> Cells:
    """The parts of a step; a round alone is both halves and no rest."""
    draft, verify = row["draft_ms"], row["verify_ms"]
    step = row["step_ms"] if "step_ms" in row else draft + verify
    return {"step ms": step, "draft ms": draft, "verify ms": verify, "rest ms": row.get("rest_ms")}


def _plain(rows: Iterable[Cells]) -> float | None:
    """Tokens a second of plain decoding among these rows."""
    return next((row["tok_s"] for row in rows if row["drafter"] == "none"), None)


def _over(speed: float, plain: float | None) -> float | None:
    return None if plain is None else speed / plain


def _short(drafter: str) -> str:
    """A drafter without the temporary path of a checkpoint; a model keeps its name."""
    parts = []
    for part in drafter.split("+"):
        name, _, options = part.partition(":")
        kept = [option for option in options.split(",") if option and not option.startswith("checkpoint=")]
        kept = [f"model={Path(option).name}" if option.startswith("model=") else option for option in kept]
        parts.append(f"{name}:{','.join(kept)}" if kept else name)
    return "+".join(parts)


def _written(value: Any, how: str) -> str:
    return "" if value is None else format(value, how)
