"""The styles in which models write tool calls, and which of them a chat template asks for."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection

from slipstream.server.parsing.tool_parser import ToolParser

_NAME = re.compile(r"([\w.-]+)\s*(\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAME = re.compile(r"[\w.-]*\s*(\[(A(R(G(S(\]\s*)?)?)?)?)?)?")


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen."""

    marker = "<tool_call>"
    end = "</tool_call>"

    def _after_marker(self) -> bool:
        return self._object()

    def _after_call(self) -> bool:
        if self._next_character() == "{":  # several calls between one pair of tags
            return self._begin_call()
        if self._rest.startswith(self.end):
            self._drop(len(self.end))
        elif not self._ended and self.end.startswith(self._rest):
            return False
        return self._go_on()


class Llama3Parser(ToolParser):
    """`{"name": ..., "parameters": {...}}`, of Llama 3: after `<|python_tag|>`, or as the beginning of an answer.

    Calls are separated by semicolons. Without the tag only the given tools' names are calls: any other object is an
    answer in JSON.
    """

    marker = "<|python_tag|>"
    needs_special_tokens = True

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str] | None = None, *, several: bool = True
    ) -> None:
        super().__init__(names, new_id, several=several)
        self._state = self._beginning
        self._tagged = False

    def _beginning(self) -> bool:
        c = self._rest.lstrip()[:1]
        if not c and not self._ended:
            return False
        self._state = self._untagged if c == "{" else self._text
        return True

    def _untagged(self) -> bool:
        return self._object(known=self._names)

    def _after_marker(self) -> bool:
        self._tagged = True
        return self._object()

    def _after_call(self) -> bool:
        c = self._next_character()
        if not c and not self._ended:
            return False
        if c == ";":
            self._keep(1)
            self._state = self._after_marker if self._tagged else self._untagged
            return True
        return self._go_on()


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, of Mistral.

    Newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call.
    """

    marker = "[TOOL_CALLS]"
    needs_special_tokens = True
    _listed = False

    @staticmethod
    def make_id() -> str:
        """Nine letters and digits: the chat templates refuse any other."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _after_marker(self) -> bool:
        c = self._next_character()
        if not c and not self._ended:
            return False
        self._listed = c == "["
        if self._listed:
            self._keep(1)
            self._state = self._object
            return True
        if named := _NAME.match(self._rest):
            self._keep(named.end())
            return self._begin_call(named.group(1))
        return (self._ended or not _MAY_BE_NAME.fullmatch(self._rest)) and self._no_call()

    def _after_call(self) -> bool:
        if not self._listed:
            return self._go_on()
        c = self._next_character()
        if not c and not self._ended:
            return False
        if c == ",":
            self._keep(1)
            self._state = self._object
            return True
        if c == "]":
            self._drop(1)
        return self._go_on()


TOOL_STYLES: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def find_tool_style(template: str) -> str | None:
    """The style that a chat template asks for, by its markers; None if it asks for none of ours."""
    if MistralParser.marker in template:
        return "mistral"
    if HermesParser.marker in template:
        return None if "<function=" in template else "hermes"  # calls in XML between the same tags
    llama = Llama3Parser.marker in template or '"parameters": dictionary' in template
    return "llama3_json" if llama else None
