"""What the parsers of tool calls share: text up to a marker, calls after it, and text again."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from slipstream.server.parsing.call_reader import CallReader
from slipstream.server.parsing.scanner import Scanner, held_back


def new_call_id() -> str:
    """An id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser(Scanner):
    """Splits an answer into content and tool calls. A style says what may follow its marker and a call.

    Text is content unless it becomes a call: what follows a marker and is no call is content, marker included. A call
    that stops being JSON after its arguments have begun stays as far as it came; what follows is content. White space
    between content and calls is dropped, not that between two parts of the content. Unless there may be `several`
    calls, the answer is over after the first one: what follows it is dropped.
    """

    marker: ClassVar[str]

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str] | None = None, *, several: bool = True
    ) -> None:
        super().__init__()
        self._names = names
        self._several = several
        self._new_id = new_id or self.make_id
        self._count = 0
        self._spoke = False  # whether there was content
        self._state: Callable[[], bool] = self._text
        self._raw = ""  # taken since the marker (or the last call); content after all if no call comes of it
        self._call = CallReader(0, "")

    @staticmethod
    def make_id() -> str:
        """A new call's id."""
        return new_call_id()

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._count > 0 or self._call.started

    @property
    def over(self) -> bool:
        """Whether there was a call, not cut by the end of the answer, and there may be no other."""
        return not self._several and self._call.started and (self._call.done or self._call.failed)

    @abstractmethod
    def _after_marker(self) -> bool:
        """Continue after a marker."""

    @abstractmethod
    def _after_call(self) -> bool:
        """Continue after a complete call."""

    def _advance(self) -> bool:
        if self.over:
            self._rest = ""
            return False
        return self._state()

    def _text(self) -> bool:
        """Content up to the marker. White space before it waits, as it is dropped if a call follows."""
        place = self._rest.find(self.marker)
        if place >= 0:
            before = len(self._rest[:place].rstrip())
            self._say(before)
            self._state = self._after_marker
            self._keep(place - before + len(self.marker))
            return True
        if self._ended:
            self._say(len(self._rest.rstrip() if self._count else self._rest))
        else:
            self._say(len(self._rest[: len(self._rest) - held_back(self._rest, self.marker)].rstrip()))
        return False

    def _say(self, length: int) -> None:
        """Take content."""
        self._content.append(self._take(length))
        self._spoke = self._spoke or length > 0

    def _go_on(self) -> bool:
        """Text again, after calls."""
        self._rest, self._raw = self._raw + self._rest, ""
        self._state = self._text if self._spoke else self._text_after_call
        return True

    def _text_after_call(self) -> bool:
        self._rest = self._rest.lstrip()
        if self._rest:
            self._state = self._text
        return bool(self._rest)

    def _keep(self, length: int) -> None:
        """Take text that is content only if no call comes of it."""
        self._raw += self._take(length)

    def _drop(self, length: int) -> None:
        """Take the end of a call, with the white space before it."""
        self._take(length)
        self._raw = ""

    def _next_character(self) -> str:
        """The next character that is not white space; empty if there is none yet."""
        self._keep(len(self._rest) - len(self._rest.lstrip()))
        return self._rest[:1]

    def _object(self, known: Collection[str] | None = None) -> bool:
        """A call that begins here, or else none."""
        c = self._next_character()
        if not c and not self._ended:
            return False
        return self._begin_call(known=known) if c == "{" else self._no_call()

    def _begin_call(self, name: str | None = None, known: Collection[str] | None = None) -> bool:
        self._call = CallReader(self._count, self._new_id(), name, known)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        used, deltas = self._call.read(self._rest)
        self._calls += deltas
        self._keep(used)
        if self._call.started:
            self._raw = ""
        if self._call.done:
            self._count += 1
            self._state = self._after_call
            return True
        if not self._call.failed and not self._ended:
            return False
        if not self._call.started:
            return self._no_call()
        self._count += 1
        self._state = self._text
        return bool(self._rest)

    def _no_call(self) -> bool:
        """Handle a marker without a call: the marker (or one character) is content, and the rest is read again."""
        space = len(self._raw) - len(self._raw.lstrip())
        sure = space + (len(self.marker) if self._raw.startswith(self.marker, space) else 1)
        self._rest, self._raw = self._raw + self._rest, ""
        self._say(sure)
        self._state = self._text
        return True
