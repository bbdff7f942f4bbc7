"""The parser of a whole answer: a reasoning part first, then content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import unknown_choice
from slipstream.server.parsing.base import OutputParser, Parsed, ParserRequest, PassThrough
from slipstream.server.parsing.forced import call_grammar, function_names
from slipstream.server.parsing.reasoning import (
    REASONING_STYLES,
    ReasoningParser,
    ReasoningStyle,
    begins_inside,
    find_reasoning_style,
)
from slipstream.server.parsing.tool_styles import TOOL_STYLES, find_tool_style


class AnswerParser:
    """Two parsers in a row: what is content for the first is the text of the second."""

    def __init__(self, reasoning: OutputParser, tools: OutputParser) -> None:
        self._reasoning, self._tools = reasoning, tools
        self.needs_special_tokens = reasoning.needs_special_tokens or tools.needs_special_tokens

    @property
    def called(self) -> bool:
        """Whether there was a tool call."""
        return self._tools.called

    @property
    def over(self) -> bool:
        """Whether nothing that follows belongs to the answer."""
        return self._tools.over

    def push(self, text: str) -> Parsed:
        """The parts that this text completes."""
        first = self._reasoning.push(text)
        second = self._tools.push(first.content)
        return Parsed(second.content, first.reasoning, second.tool_calls)

    def finish(self) -> Parsed:
        """The parts that were held back, at the end of the answer."""
        first = self._reasoning.finish()
        second, last = self._tools.push(first.content), self._tools.finish()
        return Parsed(second.content + last.content, first.reasoning, second.tool_calls + last.tool_calls)


@dataclass(frozen=True)
class Parsing:
    """How the answers of the served model are parsed: the names of a tool style and a reasoning style, or None."""

    tools: str | None = None
    reasoning: str | None = None

    def __call__(self, request: ParserRequest) -> OutputParser:
        """A parser for one choice."""
        style = self.reasoning_style
        names = function_names(request.tools)
        wanted = names and request.tool_choice != "none"
        reasoning = ReasoningParser(style, begins_inside(style, request.prompt_end)) if style else PassThrough(request)
        if not wanted or self.tools is None:
            return AnswerParser(reasoning, PassThrough(request))
        return AnswerParser(reasoning, TOOL_STYLES[self.tools](names, several=request.parallel_tool_calls))

    @property
    def reasoning_style(self) -> ReasoningStyle | None:
        """The tags of a reasoning part; a grammar begins after its end."""
        return REASONING_STYLES[self.reasoning] if self.reasoning else None

    def grammar(self, request: ParserRequest, special_ids: Mapping[str, int]) -> str | None:
        """A Lark grammar of the calls that `tool_choice` or `strict` asks for; None if they leave the model free.

        `special_ids`: ids of the special tokens, by their text.
        """
        return call_grammar(self.tools, request, special_ids, self.reasoning_style)


def parser_factory(tool_parser: str, reasoning_parser: str, chat_template: str | None) -> Parsing:
    """What makes the parser of each choice of a chat.

    A parser is named, or `none`, or `auto`: then the model's chat template decides.
    """
    template = chat_template or ""
    tools = _chosen("tool-call parser", tool_parser, list(TOOL_STYLES), find_tool_style(template))
    reasoning = _chosen("reasoning parser", reasoning_parser, list(REASONING_STYLES), find_reasoning_style(template))
    return Parsing(tools, reasoning)


def _chosen(kind: str, name: str, valid: Sequence[str], found: str | None) -> str | None:
    if name == "auto":
        return found
    if name == "none":
        return None
    if name not in valid:
        raise unknown_choice(kind, name, ["auto", "none", *valid])
    return name
