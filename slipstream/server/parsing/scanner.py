"""What the parsers of markers share: the text that is not parsed yet, and the parts found so far."""

from __future__ import annotations

from abc import ABC, abstractmethod

from slipstream.server.parsing.base import Parsed, ToolCallDelta


class Scanner(ABC):
    """A parser as a machine over the text that it has not taken yet (`_rest`).

    `_advance` takes some of it, or says that it has to wait. It decides only what no later text can change, so the
    parts do not depend on how the text was cut.
    """

    needs_special_tokens = False

    def __init__(self) -> None:
        self._rest = ""
        self._ended = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @property
    def called(self) -> bool:
        """Whether there was a tool call."""
        return False

    @property
    def over(self) -> bool:
        """Whether nothing that follows belongs to the answer."""
        return False

    def push(self, text: str) -> Parsed:
        """The parts that this text completes."""
        self._rest += text
        return self._run()

    def finish(self) -> Parsed:
        """The parts that were held back, at the end of the answer."""
        self._ended = True
        return self._run()

    @abstractmethod
    def _advance(self) -> bool:
        """Take some of the text; False if more of it is needed first (never once `_ended` and there is text)."""

    def _run(self) -> Parsed:
        while self._advance():
            pass
        parsed = Parsed("".join(self._content), "".join(self._reasoning), self._calls)
        self._content, self._reasoning, self._calls = [], [], []
        return parsed

    def _take(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


def held_back(text: str, marker: str) -> int:
    """How many of the last characters of a text may be the beginning of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
