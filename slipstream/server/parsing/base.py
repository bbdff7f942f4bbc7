"""Parsers between the deltas of one choice and its chunks on the wire.

The engine gives text; a parser splits it into content, reasoning and tool calls. One parser per choice, made by a
`ParserFactory` when the request starts. Every parser holds back what may still become a marker, so the parts do not
depend on how the text was cut into deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of one tool call. The first part of a call has `id` and `name`; the arguments' JSON follows in pieces."""

    index: int  # which call of the answer
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Parsed:
    """What some text turned out to be; parts that are empty are not sent."""

    content: str = ""
    reasoning: str = ""  # `reasoning_content` on the wire
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class ParserRequest:
    """What a parser may know of its request."""

    prompt_end: str = ""  # the end of the rendered prompt: some templates open the reasoning part themselves
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"  # with `none`, or without tools, nothing is parsed as a call
    parallel_tool_calls: bool = True


class OutputParser(Protocol):
    """Splits the text of one choice as it arrives."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether its markers are special tokens, which decoding otherwise leaves out of the text."""

    def push(self, text: str) -> Parsed:
        """The parts that this text completes."""

    def finish(self) -> Parsed:
        """The parts that were held back, at the end of the answer."""

    @property
    def called(self) -> bool:
        """Whether there was a tool call, so that `finish_reason` is `tool_calls` where the model stopped by itself."""

    @property
    def over(self) -> bool:
        """Whether the answer is complete, whatever the model still writes: there was the one call that is allowed."""


ParserFactory = Callable[[ParserRequest], OutputParser]


class PassThrough:
    """All text is content."""

    needs_special_tokens = False
    called = False
    over = False

    def __init__(self, request: ParserRequest) -> None:
        pass

    def push(self, text: str) -> Parsed:
        """The text, unchanged."""
        return Parsed(content=text)

    def finish(self) -> Parsed:
        """Nothing is held back."""
        return Parsed()
