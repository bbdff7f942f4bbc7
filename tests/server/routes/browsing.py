"""A real browser on the playground: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """The playground in a tab of its own. It asks nobody but its server, and no script of it fails."""
    asked: list[str] = []
    failures: list[str] = []
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not [one for one in asked if not one.startswith((url, "data:"))]
    assert not failures


def connected(page: Any) -> Any:
    page.wait_for_selector(".dot.on")
    return page


def ask(page: Any, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def growing(page: Any, steps: int = 4) -> None:
    """Wait until some steps of an answer are there."""
    page.wait_for_function("n => document.querySelectorAll('.step').length >= n", arg=steps)


def answered(page: Any) -> str:
    """The last answer, when it is complete."""
    page.wait_for_selector("#send:not([hidden])")
    return str(page.locator(".message.assistant .text").last.text_content())
