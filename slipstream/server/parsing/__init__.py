"""From the text of an answer to its parts: content, reasoning, tool calls."""

from __future__ import annotations

from slipstream.server.parsing.answer import Parsing, parser_factory
from slipstream.server.parsing.base import OutputParser, Parsed, ParserFactory, ParserRequest, PassThrough

__all__ = ["OutputParser", "Parsed", "ParserFactory", "ParserRequest", "Parsing", "PassThrough", "parser_factory"]
