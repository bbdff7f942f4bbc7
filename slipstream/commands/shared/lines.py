"""Reads a user's messages from a terminal or a pipe, and handles Ctrl-C safely."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from types import FrameType
from typing import Any, Final

END: Final[Any] = None  # returned by `read` at the end of the input
_QUOTES = '"""'


class LineReader:
    """Messages, one at a time. A terminal has prompts, editing and history; a pipe just lines."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):  # importing it gives input() editing and history
                importlib.import_module("readline")

    def read(self) -> tuple[Any, bool]:
        """The next message and whether it is a command; END at the end of the input.

        Only a single line can be a command: quoted and continued text is always a message.
        """
        line = self._line(">>> ")
        if line is None:
            return END, False
        if line.strip() == _QUOTES:
            return self._quoted(), False
        if line.endswith("\\"):
            return self._continued(line), False
        return (line.strip(), True) if _looks_like_command(line) else (line, False)

    def _quoted(self) -> str:
        lines: list[str] = []
        while (line := self._line("... ")) is not None and line.strip() != _QUOTES:
            lines.append(line)
        return "\n".join(lines)

    def _continued(self, line: str) -> str:
        lines = [line[:-1]]
        while line.endswith("\\"):
            following = self._line("... ")
            if following is None:
                break
            line = following
            lines.append(line.removesuffix("\\"))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                print()  # so that the shell's prompt starts on a new line
                return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None


def _looks_like_command(line: str) -> bool:
    """`/word ...`; a path such as /usr/bin is a message."""
    first = line.split(maxsplit=1)[0] if line.strip() else ""
    return first.startswith("/") and "/" not in first[1:] and first != "/"


class Interrupts:
    """While open, the first Ctrl-C is only recorded, so that an engine step is never interrupted.

    A second one interrupts at once: a long prefill takes time before there is anything to stop.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None
        # Only the main thread can have signal handlers; elsewhere Ctrl-C never arrives.
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupts:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
