"""The report in a real browser: on a desktop, on a phone, in the dark and on paper."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.report.page import render
from tests.bench.reports import SWEEPS, decided, measured, unlooped
from tests.bench.sse_server import serving
from tests.invoking import invoke
from tests.server.routes.browsing import DESKTOP, PHONE, chromium

LIGHT, DARK = "rgb(255, 255, 255)", "rgb(16, 21, 28)"  # the paper


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports with all sections: sweeps, decisions of `auto`, a server."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("sweeps", "auto", "server")}
    runs = {
        "sweeps": measured(tiny, folders["sweeps"], *SWEEPS, tokens=20, minutes=0.2),
        "auto": decided(tiny, folders["auto"]),
    }
    for name, results in runs.items():
        (folders[name] / "report.html").write_text(render(unlooped(results)))
    with serving(tokens=3) as server, ThreadPoolExecutor(1) as pool:  # playwright has the event loop of this thread
        line = ("bench", "--url", server.url, "--concurrency", "1,2", "--requests", "4", "-o", str(folders["server"]))
        done = pool.submit(invoke, *line).result()
    assert done.exit_code == 0, done.output
    return {name: folder / "report.html" for name, folder in folders.items()}


@contextmanager
def opened(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    """A page from its file. It asks for nothing else, and says nothing on the console."""
    asked: list[str] = []
    said: list[str] = []
    context = browser.new_context(**options)
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    try:
        page.goto(file.as_uri())
        yield page
    finally:
        context.close()
    assert asked == [file.as_uri()]
    assert not said


def too_wide(page: Any) -> list[str]:
    """What sticks out of the page; wide tables and trees are scrolled in a frame of their own."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(one =>
            !one.closest(".scroll, svg") && one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
        ).map(one => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`)"""
    )
    return found


@pytest.mark.parametrize("name", ["sweeps", "auto", "server"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_whole_on_every_screen(
    browser: Any, pages: dict[str, Path], name: str, viewport: dict[str, int], scheme: str
) -> None:
    with opened(browser, pages[name], viewport=viewport, color_scheme=scheme) as page:
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (DARK if scheme == "dark" else LIGHT)
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        assert too_wide(page) == []
        if viewport == DESKTOP:
            tables = "[...document.querySelectorAll('.scroll:has(table)')]"
            assert page.evaluate(f"{tables}.every(one => one.scrollWidth <= one.clientWidth)")
        drawings = page.locator("svg")
        assert drawings.count() >= 2
        for place in range(drawings.count()):
            box = drawings.nth(place).bounding_box()
            assert box["width"] > 100 and box["height"] > 30


@pytest.mark.parametrize("name", ["sweeps", "auto", "server"])
def test_on_paper_a_report_is_light_and_nothing_is_cut_off(browser: Any, pages: dict[str, Path], name: str) -> None:
    """A4 has 794 pixels; the report is opened by somebody whose screen is dark."""
    with opened(browser, pages[name], viewport={"width": 794, "height": 1123}, color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).getPropertyValue('--paper').trim()") == "#fff"
        assert page.evaluate("document.documentElement.scrollWidth") <= 794
        cut = page.evaluate(
            """() => [...document.querySelectorAll(".scroll > *")].filter(one =>
                one.getBoundingClientRect().right > document.documentElement.clientWidth + 1).length"""
        )
        assert cut == 0
        assert page.pdf(format="A4").startswith(b"%PDF")
