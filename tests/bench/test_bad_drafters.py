"""`benchmarks.bad_drafters`: what is measured again, and what passes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bad_drafters import KINDS, Row, keep, load, missing, show

ROW = Row("int8", "random", "p", 128, 1000.0, 1010.0, 5, 0, same=True)


def rows(kind: str, count: int, **changed: object) -> list[Row]:
    return [replace(ROW, kind=kind, prompt=f"p{number}", **changed) for number in range(count)]


def test_a_kind_with_too_few_requests_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    keep(file, rows("random", 10))
    keep(file, rows("sleeps", 100))
    given = argparse.Namespace(kinds=list(KINDS), requests=100, quantize="int8")
    assert missing(load(file), given) == ["random", "raises", "nan", "sure"]
    assert missing(load(file), argparse.Namespace(**{**vars(given), "quantize": "none"})) == list(KINDS)
    keep(file, rows("random", 100, planted_ms=1000.0))
    found = [row for row in load(file) if row.kind == "random"]
    assert len(found) == 100 and {row.planted_ms for row in found} == {1000.0}  # the short run is gone
    assert missing(load(file), given) == ["raises", "nan", "sure"]


def test_what_costs_more_than_three_percent_or_changes_a_text_fails(capsys: pytest.CaptureFixture[str]) -> None:
    show([*rows("random", 4), *rows("sleeps", 4, planted_ms=1031.0), *rows("nan", 4, same=False)])
    lines = {line.split(" | ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("| int8")}
    assert lines["random"].endswith("| identical | pass |") and "1.010x" in lines["random"]
    assert lines["sleeps"].endswith("| identical | FAIL |")
    assert lines["nan"].endswith("| DIFFER | FAIL |")
