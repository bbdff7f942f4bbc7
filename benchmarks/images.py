"""The pictures of the documents: the playground and a bench's report in a browser, and `slipstream demo` in a terminal.

    python -m benchmarks.images [--only playground|demo|report] [--speculate DRAFTER]

Needs Chromium and playwright. What the pictures show was measured while they were taken: close other programs first.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
_QUESTION = "Write a Python class"  # one of the page's examples
_COLUMNS, _ROWS = 108, 41

_PAGE = """<!doctype html><meta charset="utf-8"><style>
html {{ background: #fff; }}
body {{ margin: 0; padding: 28px; background: #fff; width: max-content; }}
div {{ border-radius: 10px; background: #17181a; box-shadow: 0 8px 30px rgb(0 0 0 / 22%); padding: 16px 22px 20px; }}
i {{ display: inline-block; width: 11px; height: 11px; border-radius: 50%; background: #3c3e42; margin: 0 6px 8px 0; }}
pre {{ margin: 0; font: 13.5px/1.45 "JetBrains Mono", "DejaVu Sans Mono", monospace; color: #d5d6d8; }}
</style><body><div><i></i><i></i><i></i><pre>{text}</pre></div>"""


def playground(browser: Any, speculate: str | None) -> None:
    """A question asked, and a step with a tree worth looking at."""
    command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", "--no-access-log"]
    chosen = ["--speculate", speculate] if speculate else []
    server = subprocess.Popen([*command, *chosen], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = re.search(r"http://\S+", server.stderr.readline())
        assert found is not None, "the server did not start"
        url = found.group()
        _wait_for(f"{url}/health", server)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.goto(url)
        page.wait_for_selector(".dot.on")
        for _ in range(2):  # the second time everything is warm
            page.locator("#fresh").click()
            page.get_by_role("button", name=_QUESTION).click()
            page.wait_for_selector("#stop:not([hidden])")
            page.wait_for_selector("#send:not([hidden])", timeout=120_000)
        page.locator("#scroll").evaluate("box => { box.scrollTop = 0 }")
        step = page.locator(".step:visible").nth(_instructive(page))
        step.click()
        page.mouse.move(5, 700)
        page.locator("#prompt").focus()
        time.sleep(0.5)  # colours fade
        page.screenshot(path=IMAGES / "playground.png")
    finally:
        server.terminate()
        server.wait(60)


def _instructive(page: Any) -> int:
    """A visible step in the first screen where much was accepted, and much rejected."""
    count: int = page.evaluate("""() => {
        const top = [...document.querySelectorAll(".step")].filter((one) => one.getClientRects().length);
        const drafted = (one) => one.querySelectorAll("[data-origin]").length;
        const seen = top.filter((one) => one.getBoundingClientRect().bottom < 620);
        return top.indexOf(seen.filter((one) => drafted(one) >= 3 && drafted(one) <= 5)[1] ?? seen[0]);
    }""")
    return count


def _wait_for(url: str, server: subprocess.Popen[str]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server ended before it was ready")


def demo(browser: Any, speculate: str | None) -> None:
    """The last lines of the demo, as a terminal shows them."""
    chosen = ["--speculate", speculate] if speculate else []
    command = ["slipstream", "demo", *chosen]
    shown = _in_terminal(command)
    lines = _as_html(shown).rstrip("\n").split("\n")[-_ROWS:]
    lines = lines[lines.index("") + 1 :]  # from the beginning of a prompt
    page = browser.new_page(device_scale_factor=1.5)
    page.set_content(_PAGE.format(text="\n".join([f"$ {' '.join(command)}", "...", "", *lines])))
    page.locator("body").screenshot(path=IMAGES / "demo.png")


def report(browser: Any, speculate: str | None) -> None:
    """The beginning of a report: verdicts and speed-ups after three minutes."""
    chosen = ["--speculate", speculate] if speculate else []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "slipstream", "bench", *chosen, "-o", folder], cwd=ROOT, check=True)
        photograph(browser, Path(folder))


def photograph(browser: Any, folder: Path) -> None:
    """The report of a bench that was measured before."""
    page = browser.new_page(viewport={"width": 1080, "height": 1240}, color_scheme="light")
    page.goto((folder / "report.html").absolute().as_uri())
    page.screenshot(path=IMAGES / "report.png")


def _in_terminal(command: list[str]) -> str:
    """What a command writes to a terminal. `slipstream` is this copy of it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "slipstream"
        program.write_text(f"#!{sys.executable}\nfrom slipstream.cli import main\nmain()\n")
        program.chmod(0o755)
        search = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), "COLUMNS": str(_COLUMNS)}
        ours, theirs = pty.openpty()
        found = str(shutil.which(command[0], path=search))
        process = subprocess.Popen([found, *command[1:]], stdout=theirs, stderr=theirs, cwd=folder, env=environment)
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            written += read
        os.close(ours)
        if process.wait():
            raise SystemExit(written.decode(errors="replace"))
    text = written.decode().replace("\r\n", "\n")
    return re.sub(r"[^\n]*(\r|\x1b\[K)", "", text)  # lines that were written over


def _as_html(text: str) -> str:
    """Colours of a terminal as HTML, wrapped at its width."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=False)
    return console.export_html(theme=MONOKAI, inline_styles=True, code_format="{code}")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["playground", "demo", "report"])
    parser.add_argument("--speculate", help="the drafter (default: that of each command)")
    arguments = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as started:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = started.chromium.launch(executable_path=path, args=_FLAGS)
        for take in (playground, demo, report):
            if arguments.only in (None, take.__name__):
                take(browser, arguments.speculate)
                print(IMAGES / f"{take.__name__}.png")
        browser.close()


if __name__ == "__main__":
    main()
