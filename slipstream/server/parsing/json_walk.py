"""JSON, one character at a time."""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}


class _State(Enum):
    VALUE = auto()  # a value must follow
    ITEM_OR_END = auto()  # after "["
    KEY = auto()
    KEY_OR_END = auto()  # after "{"
    COLON = auto()
    AFTER = auto()  # after a value inside of something: a comma or the end
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    DONE = auto()


class JsonWalker:
    """Follows one object or list as it is written, and says at the first wrong character that it is not JSON."""

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._open: list[str] = []
        self._string_is_key = False
        self._hex_digits = 0
        self._scalar = ""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def done(self) -> bool:
        """Whether the value is complete."""
        return self._state is _State.DONE

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string (its closing quote included)."""
        return self._state in (_State.STRING, _State.ESCAPE, _State.HEX)

    @property
    def awaits_value(self) -> bool:
        """Whether the next character that is not white space begins a value."""
        return self._state in (_State.VALUE, _State.ITEM_OR_END)

    @property
    def awaits_colon(self) -> bool:
        """Whether a key has just ended."""
        return self._state is _State.COLON

    def step(self, c: str) -> bool:
        """Go on by one character; False if no JSON begins like this."""
        if self.in_string:
            return self._in_string(c)
        if self._state is _State.SCALAR:
            if c not in _SPACE and c not in ",]}":
                self._scalar += c
                return True
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self._state = _State.AFTER
        return c in _SPACE or self._between(c)

    def _in_string(self, c: str) -> bool:
        if self._state is _State.HEX:
            self._hex_digits -= 1
            if self._hex_digits == 0:
                self._state = _State.STRING
            return c in "0123456789abcdefABCDEF"
        if self._state is _State.ESCAPE:
            self._state, self._hex_digits = (_State.HEX, 4) if c == "u" else (_State.STRING, 0)
            return c in 'u"\\/bfnrt'
        if c == '"':
            self._state = _State.COLON if self._string_is_key else _State.AFTER
        elif c == "\\":
            self._state = _State.ESCAPE
        return c >= " "

    def _between(self, c: str) -> bool:
        state = self._state
        if self._open and c == _CLOSERS[self._open[-1]]:
            self._open.pop()
            self._state = _State.AFTER if self._open else _State.DONE
            return state in (_State.AFTER, _State.KEY_OR_END, _State.ITEM_OR_END)
        if state in (_State.KEY, _State.KEY_OR_END):
            self._state, self._string_is_key = _State.STRING, True
            return c == '"'
        if state is _State.COLON:
            self._state = _State.VALUE
            return c == ":"
        if state is _State.AFTER:
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
            return c == ","
        return state is not _State.DONE and self._begin_value(c)

    def _begin_value(self, c: str) -> bool:
        if c in _CLOSERS:
            self._open.append(c)
            self._state = _State.KEY_OR_END if c == "{" else _State.ITEM_OR_END
        elif not self._open:  # neither an object nor a list
            return False
        elif c == '"':
            self._state, self._string_is_key = _State.STRING, False
        else:
            self._state, self._scalar = _State.SCALAR, c
        return True
