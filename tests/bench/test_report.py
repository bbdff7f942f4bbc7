"""The report: one page without outside requests, whole with few figures and with many."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from slipstream.bench.report import charts
from slipstream.bench.report.charts import Point, Series
from slipstream.bench.report.page import render
from slipstream.bench.report.svg import Scale, Svg
from slipstream.bench.report.tree_chart import token_tree
from tests.bench.sse_server import serving
from tests.invoking import invoke

VOID = {"meta", "br", "img", "link", "input"}


class Checker(HTMLParser):
    """Every element is closed, and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "link", "iframe", "object"), f"{tag} may fetch something"
        assert not given.keys() & {"src", "href", "onload", "srcset"}, f"{tag} would fetch something"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def checked(page: str) -> Checker:
    found = Checker()
    found.feed(page)
    assert not found.open
    assert not re.search(r"@import|url\(", page), "nothing from outside"
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in drawing
    return found


@pytest.fixture(scope="module")
def results(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real run on a tiny model, with all sweeps."""
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "mine.jsonl"
    lines = [{"prompt": f"The quick <b>brown</b> {n}", "category": kind} for kind in ("a", "b & c") for n in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    done = invoke("bench", "-m", tiny, "--prompts", str(file), "--tokens", "20", "--minutes", "0.25",
                  "--speculate", "suffix", "--speculate", "ngram", "--batch", "1,2", "--context", "100,200",
                  "--temperature", "0,0.9", "--nodes", "2,8", "--price", "1/h", "-o", str(folder))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").exists()
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def unlooped(results: dict[str, Any]) -> dict[str, Any]:
    """A tiny random model loops on every prompt: its figures as if it did not."""
    for condition in results["conditions"]:
        for each in condition["figures"].values():
            if each["all"] is None:
                each["all"], each["looping"] = each["looping"], None
    return results


def test_a_report_is_whole_and_fetches_nothing(results: dict[str, Any]) -> None:
    page = render(unlooped(json.loads(json.dumps(results))))
    titles = checked(page).titles
    assert titles[:3] == ["Verdicts", "Speed-up by category", "Where the time goes"]
    assert {"Under other conditions", "Tree size", "Latency percentiles", "Who wrote it"} <= set(titles)
    assert "for others of these kinds: suffix " in page
    assert "<b>brown</b>" not in page and "&lt;b&gt;brown" in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert len(page) < 400_000


def test_a_report_without_figures_has_no_charts_but_is_whole(results: dict[str, Any]) -> None:
    bare = json.loads(json.dumps(results))
    bare["conditions"], bare["samples"] = bare["conditions"][:1], []
    for each in bare["conditions"][0]["figures"].values():
        for category in each:
            each[category] = None
    assert "Tree size" not in checked(render(bare)).titles


def test_decisions_are_shown_where_there_are_any(results: dict[str, Any]) -> None:
    assert "Decisions" not in checked(render(unlooped(json.loads(json.dumps(results))))).titles
    decided = unlooped(json.loads(json.dumps(results)))
    step = {"drafters": ["suffix"], "probe": True, "nodes": 4, "tokens": 2, "reason": "suffix promised <much>"}
    decided["samples"][0]["decisions"] = [step, {**step, "drafters": [], "nodes": 0, "tokens": 1, "probe": False}]
    page = render(decided)
    assert "Decisions" in checked(page).titles and "suffix promised &lt;much&gt;" in page


def test_a_server_has_a_report_too(tmp_path: Path) -> None:
    with serving(tokens=3) as server:
        done = invoke("bench", "--url", server.url, "--concurrency", "1,2", "--requests", "4", "-o", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert checked((tmp_path / "report.html").read_text()).titles == ["Figures", "Over load", "Latency percentiles"]


def test_a_drawn_tree_has_every_node_once_and_marks_the_path() -> None:
    tree = {
        "tokens": [" the", " quick", " lazy", " brown", " red", "\n"], "parents": [-1, 0, 0, 1, 1, 3],
        "origins": [None, "suffix", "eagle3", "suffix", "eagle3", "suffix"],
        "confidence": [1.0, 0.9, 0.1, 0.8, 0.1, 0.7], "accepted": [1, 3], "own": " fox",
    }  # fmt: skip
    drawing = token_tree(tree, {"suffix": "s1", "eagle3": "s2"})
    ElementTree.fromstring(drawing)
    boxes = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"[^>]*class="node ([^"]*)"', drawing)
    assert len(boxes) == 7 and len({(x, y) for x, y, _ in boxes}) == 7
    kinds = [kind for _, _, kind in boxes]
    assert kinds.count("s1 fill") == 2 and kinds.count("s2 outline") == 2 and kinds[0] == "root" and kinds[-1] == "own"
    assert drawing.count("edge taken") == 3


def test_ticks_are_round_and_within_the_range() -> None:
    for high in (0.013, 0.9, 3.1, 47.0, 1234.5):
        ticks = Scale(0, high, 0, 100).ticks(5)
        assert 3 <= len(ticks) <= 8 and ticks[0] == 0 and ticks[-1] <= high


def test_an_interval_beyond_the_chart_has_an_arrow_and_says_where_it_ends() -> None:
    """With few prompts a bound may be far away: no cap is drawn where the chart ends."""
    one, other = (charts.speedups([("all", [(2.0, 1.0, high)])], [Series("auto", "s1")]) for high in (2.5, 8.0))
    assert one.count("whisker") == 3 and "to 2.5x" not in one.replace("(1.00 to 2.50)", "")
    assert other.count("whisker") == 4 and ">to 8.0x<" in other


def test_text_is_escaped() -> None:
    svg = Svg(10, 10, 'a "label" & more')
    svg.text(0, 0, "<script>")
    svg.rect(0, 0, 1, 1, "x", title="<&>")
    ElementTree.fromstring(svg.render())


def test_what_a_setting_took_by_itself_is_a_ring_between_the_sizes() -> None:
    points = {"auto": [Point("4", [1.0, None, None]), Point("16", [0.8, None, None])]}
    drawn = charts.sweep(points, [Series("auto", "s1")], "nodes", "tokens per ms", own={"auto": (8.0, 1.5)})
    ring = re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="7"[^>]*><title>auto by itself: 8.0', drawn)
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4"', drawn)
    assert ring is not None and float(dots[0][0]) < float(ring[1]) < float(dots[1][0])
    assert 0 < float(ring[2]) < float(dots[0][1]), "higher than both, and within the chart"


def test_a_sweep_of_one_value_is_no_chart() -> None:
    series = [Series("a", "s1")]
    assert charts.sweep({"a": [Point("1", [1.0, None, None])]}, series, "batch", "x") == ""
    assert "<svg" in charts.sweep({"a": [Point("1", [1.0, 0.9, 1.1]), Point("2", [2.0, None, None])]}, series, "b", "x")
