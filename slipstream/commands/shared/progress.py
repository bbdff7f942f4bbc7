"""Progress of a long run: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from slipstream.commands.shared.terminal import note

_SECONDS = 10.0  # between two lines


class Counter:
    """Counts finished things on stderr while it is open. rich draws the bar; without it there are lines."""

    def __init__(self, things: str, total: int, done: int) -> None:
        self._things, self._total, self._done = things, total, done
        self._bar = _bar() if sys.stderr.isatty() else None
        self._next = time.monotonic() + _SECONDS

    def __enter__(self) -> Counter:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._things, total=self._total, completed=self._done, speed="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, speed: str = "") -> None:
        """Count one more."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, **({"speed": speed} if speed else {}))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            note(f"{self._done} of {self._total} {self._things}{', ' if speed else ''}{speed}")


def _bar(clock: bool = False) -> Any:
    """A bar of rich, or None without rich; `clock`: it shows time, not a count."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    count = () if clock else (MofNCompleteColumn(),)
    left = TextColumn("{task.remaining:.0f} s left") if clock else TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TextColumn("{task.fields[speed]}"), left)
    return Progress(*columns, console=Console(stderr=True))


class TimeBar:
    """How much of a given time has passed, on stderr, while it is open."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, max(1e-6, seconds)
        self._began = time.monotonic()
        self._next = self._began + _SECONDS
        self._bar = _bar(clock=True) if sys.stderr.isatty() else None

    def __enter__(self) -> TimeBar:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._seconds, speed="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: str, text: str = "") -> None:
        """Show the time, what was done, and a text beside it; the last text that was not empty stays."""
        now = time.monotonic()
        if self._bar is not None:
            passed = min(self._seconds, now - self._began)
            shown = {"speed": f"{done}  {text}"} if text else {}
            self._bar.update(self._task, completed=passed, **shown)
        elif now >= self._next and text:
            self._next = now + _SECONDS
            left = max(0.0, self._seconds - (now - self._began))
            note(f"{done}, {left:.0f} s left: {text}")
