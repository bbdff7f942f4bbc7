"""One tool call in JSON, as it is written: its name, then its arguments piece by piece."""

from __future__ import annotations

import json
from collections.abc import Collection

from slipstream.server.parsing.base import ToolCallDelta
from slipstream.server.parsing.json_walk import JsonWalker

_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, the keys in any order, others ignored; `parameters` is `arguments`.

    A call starts (`started`) when its name and the beginning of its arguments are known; from then on the arguments'
    own characters are passed on. `failed`: this is not a call, or no longer JSON. With a `name`, the text is that of
    the arguments alone. With `known`, other names are no calls.
    """

    def __init__(self, index: int, id: str, name: str | None = None, known: Collection[str] | None = None) -> None:
        self.started = self.failed = False
        self._index, self._id = index, id
        self._name, self._known = name, known
        self._walker = JsonWalker()
        self._bare = name is not None  # the text is that of the arguments
        self._key: str | None = None  # whose value comes next
        self._string = ""  # the string being read, quotes included
        self._arguments = ""  # not yet passed on
        self._has_arguments = False

    @property
    def done(self) -> bool:
        """Whether the call is complete."""
        return self._walker.done and not self.failed

    def read(self, text: str) -> tuple[int, list[ToolCallDelta]]:
        """How many characters belong to the call, and what they gave. The one that fails is not among them."""
        deltas: list[ToolCallDelta] = []
        used = 0
        while used < len(text) and not self.done:
            if not self._step(text[used]):
                self.failed = True
                break
            used += 1
            if not self.started and self._name is not None and self._has_arguments:
                self.started = True
                deltas.append(ToolCallDelta(self._index, self._id, self._name))
        if self.started and self._arguments:
            deltas.append(ToolCallDelta(self._index, arguments=self._arguments))
            self._arguments = ""
        return used, deltas

    def _step(self, c: str) -> bool:
        walker = self._walker
        depth, in_string, begins = walker.depth, walker.in_string, walker.awaits_value and not c.isspace()
        if not walker.step(c):
            return False
        if self._bare:
            self._has_arguments = True
            self._arguments += c
        elif depth <= 1 and walker.depth <= 1:
            return self._top_level(c, in_string, begins)
        elif self._key in _ARGUMENTS:
            if depth == 1:
                if c != "{" or self._has_arguments:
                    return False
                self._has_arguments = True
            self._arguments += c
        else:
            return self._key != "name"
        return True

    def _top_level(self, c: str, in_string: bool, begins: bool) -> bool:
        """A character outside of nested values."""
        walker = self._walker
        if walker.done:
            if self._name is not None and not self._has_arguments:
                self._has_arguments, self._arguments = True, "{}"
            return self._name is not None
        if begins and walker.depth == 1 and c != '"':
            return self._key not in ("name", *_ARGUMENTS)
        if walker.in_string or in_string:
            self._string += c
            if not walker.in_string:
                text, self._string = _decoded(self._string), ""
                return self._read_key(text) if walker.awaits_colon else self._read_text(text)
        return True

    def _read_key(self, key: str) -> bool:
        self._key = key
        return True

    def _read_text(self, text: str) -> bool:
        """A value that is a string: the name, or arguments that were encoded twice."""
        if self._key == "name":
            accepted = self._name is None and bool(text) and (self._known is None or text in self._known)
            self._name = text
            return accepted
        if self._key in _ARGUMENTS:
            accepted = not self._has_arguments and _is_object(text)
            self._has_arguments, self._arguments = True, text
            return accepted
        return True


def _decoded(string: str) -> str:
    """The text of a JSON string; half a surrogate pair, which cannot be sent, becomes a question mark."""
    return str(json.loads(string)).encode("utf-8", "replace").decode()


def _is_object(text: str) -> bool:
    walker = JsonWalker()
    return text.startswith("{") and all(map(walker.step, text)) and walker.done
