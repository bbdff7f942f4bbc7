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


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
