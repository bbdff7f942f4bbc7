"""From the text of an answer to its parts: content, reasoning, tool calls."""

from __future__ import annotations

from slipstream.server.parsing.base import OutputParser, ParserFactory, ParserRequest, PassThrough

__all__ = ["OutputParser", "ParserFactory", "ParserRequest", "PassThrough", "parser_factory"]


def parser_factory(tool_parser: str, reasoning_parser: str, chat_template: str | None) -> ParserFactory:
    """What makes the parser of each choice of a chat; `auto` is decided by the model's chat template."""
    return PassThrough
