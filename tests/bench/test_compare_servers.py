"""Two results of servers side by side: what is more than chance, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.bench.compare import compare_results
from slipstream.errors import OptionError
from tests.bench.sse_server import serving
from tests.invoking import invoke


def measured(seed: int, slower: float = 1.0, loads: tuple[str, ...] = ("concurrency 4",)) -> dict[str, Any]:
    """A run of 80 requests in a closed loop of four: 20 tokens each, 10 ms apart."""
    rng = np.random.default_rng(seed)
    points = []
    for load in loads:
        lanes, starts, ttfts, itls = [0.0] * 4, [], [], []
        for number in range(80):
            ttft, gaps = 0.05 * slower * rng.gamma(20) / 20, 0.01 * slower * rng.gamma(20, size=19) / 20
            starts.append(lanes[number % 4])
            ttfts.append(float(ttft))
            itls.append([float(gap) for gap in gaps])
            lanes[number % 4] += float(ttft + gaps.sum())
        latencies = [ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)]
        points.append({
            "load": load, "duration": max(lanes), "failed": 0, "errors": [""] * 80, "output_lens": [20] * 80,
            "start_times": starts, "ttfts": ttfts, "itls": itls, "latencies": latencies,
        })  # fmt: skip
    return {"points": points, "model": {"name": "m"}, "url": "http://x", "arguments": {"tokens": 20}}


def test_two_runs_of_one_server_do_not_differ() -> None:
    (row,) = compare_results(measured(1), measured(2))["loads"]
    assert set(row["figures"]) == {"tok_s", "ttft_ms", "tpot_ms"}
    for each in row["figures"].values():
        value, low, high = each["change"]
        assert low < 1.0 < high and value == pytest.approx(each["second"] / each["first"], rel=1e-3)
    assert all("no difference shown" in verdict for verdict in row["verdicts"])


def test_a_slower_server_is_found() -> None:
    (row,) = compare_results(measured(1), measured(2, slower=1.2))["loads"]
    assert [verdict.split(":")[1].strip() for verdict in row["verdicts"]] == [
        f"{name} is worse in the second run" for name in ("tok/s", "TTFT", "TPOT")
    ]
    point = measured(1)["points"][0]
    assert row["figures"]["tok_s"]["first"] == pytest.approx(80 * 20 / point["duration"], rel=1e-3)
    assert row["figures"]["tpot_ms"]["change"][0] == pytest.approx(1.2, rel=0.02)
    assert row["figures"]["tok_s"]["change"][0] == pytest.approx(1 / 1.2, rel=0.03)


def test_a_lone_request_tells_nothing_of_the_others() -> None:
    first, second = measured(1), measured(2, slower=3.0)
    (point,) = second["points"]
    point["errors"][1:], point["failed"] = ["broken"] * 79, 79
    (row,) = compare_results(first, second)["loads"]
    said = [verdict for verdict in row["verdicts"] if "TTFT" in verdict or "TPOT" in verdict]
    assert len(said) == 2 and all("too few requests for a verdict" in verdict for verdict in said)


def test_failed_requests_are_in_no_figure_and_are_named() -> None:
    first, second = measured(1), measured(1)
    second["points"][0] |= {"failed": 1, "errors": ["HTTP 503", *[""] * 79]}
    second["points"][0]["ttfts"][0] = 1000.0
    compared = compare_results(first, second)
    assert compared["loads"][0]["figures"]["ttft_ms"]["second"] < 100
    assert compared["notes"] == ["concurrency 4: 0 and 1 requests failed"]
    second["points"][0] |= {"failed": 80, "errors": ["HTTP 503"] * 80}
    assert compare_results(first, second)["loads"][0]["figures"] == {}


def test_loads_are_compared_by_name() -> None:
    both = compare_results(measured(1, loads=("concurrency 4", "concurrency 8")), measured(2, loads=("concurrency 8",)))
    assert [row["load"] for row in both["loads"]] == ["concurrency 8"]
    with pytest.raises(OptionError, match="no load in common"):
        compare_results(measured(1), measured(1, loads=("rate 4/s",)))
    with pytest.raises(OptionError, match="one result is of a server"):
        compare_results(measured(1), {"settings": [], "answers": []})
    other = copy.deepcopy(measured(1)) | {"url": "http://y", "model": {"name": "n"}, "arguments": {"tokens": 9}}
    notes = ["url: http://x and http://y", "model: m and n", "tokens: 20 and 9"]
    assert compare_results(measured(1), other)["notes"] == notes


def test_the_verb_compares_servers(tmp_path: Path) -> None:
    with serving(tokens=4, first=0.01, gap=0.005) as server:
        for name in ("a", "b"):
            line = ["bench", "--url", server.url, "--concurrency", "2", "--requests", "12", "-o", str(tmp_path / name)]
            done = invoke(*line)
            assert done.exit_code == 0, done.output
    compared = invoke("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert compared.exit_code == 0, compared.output
    assert "concurrency 2: TTFT" in compared.output and "second / first" in compared.output
    found = json.loads(invoke("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json").stdout)
    assert found["loads"][0]["figures"]["tok_s"]["first"] > 0
