"""Terminal output: colours, tables, temporary lines, JSON.

rich makes the tables prettier if it is installed and stdout is a terminal; nothing here needs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "draft": "32", "good": "32", "bad": "31", "title": "1;36"}
# Everything that could move the cursor or change the terminal's mode; a model may emit anything.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def coloured(stream: TextIO) -> bool:
    """Whether this stream is a terminal and colours were not turned off."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, on: bool) -> str:
    """`text` in one of our styles, or unchanged."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if on and text else text


def harmless(text: str, stream: TextIO) -> str:
    """A model's text made safe for a terminal: control characters are shown, not executed. Files get every byte."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text) if stream.isatty() else text


def say(text: str = "", style: str | None = None) -> None:
    """A line on stdout."""
    print(paint(text, style, coloured(sys.stdout)) if style else text, flush=True)


def note(text: str, style: str = "dim") -> None:
    """A line on stderr: everything but the answer."""
    print(paint(text, style, coloured(sys.stderr)), file=sys.stderr, flush=True)


def print_json(value: object, *, indent: int | None = None) -> None:
    """One JSON object on stdout."""
    speaks_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not speaks_unicode, indent=indent, allow_nan=False), flush=True)


def show_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """A table on stdout; `right` names the columns of numbers."""
    listed, numeric = [list(row) for row in rows], set(right)
    if coloured(sys.stdout) and _rich_table(headers, listed, numeric):
        return
    widths = [max(len(row[i]) for row in [list(headers), *listed]) for i in range(len(headers))]
    for row in [list(headers), *listed]:
        cells = [c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


def show_pairs(pairs: Iterable[tuple[str, str]], *, indent: str = "") -> None:
    """Names and values on stdout, the values in one column."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        say(f"{indent}{name.ljust(width)}  {value}")


def _rich_table(headers: Sequence[str], rows: list[list[str]], numeric: set[int]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, not str: a cell may hold what looks like markup
    Console().print(table)
    return True


@contextmanager
def temporary_line(text: str) -> Iterator[None]:
    """A temporary line on stderr while something runs; in a terminal only."""
    shown = sys.stderr.isatty()
    if shown:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class ProgressBar:
    """Progress of a download on stderr, while it is open; silent without a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._last = -1

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._last >= 0:
            print(file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if not self._shown or percent == self._last:
            return
        self._last = percent
        width = max(10, min(40, shutil.get_terminal_size().columns - 20))
        full = width * percent // 100
        print(f"\r  [{'#' * full}{'.' * (width - full)}] {percent:3d}%", end="", file=sys.stderr, flush=True)


def mebibytes(count: int) -> str:
    """1234567 -> '1.2 MiB'."""
    return f"{count / 2**20:,.1f} MiB"
