"""The body of `POST /v1/responses`. Nothing is stored: a conversation is sent as a whole each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from slipstream.server.wire.chat import Prediction
from slipstream.server.wire.common import Body, TokenChoice


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """Settings of text output."""

    format: TextFormat | None = None
    verbosity: str | None = None

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


class Reasoning(Body):
    """`effort` is a variable of the chat template."""

    effort: str | None = None
    summary: str | None = None

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {"summary": ("auto",)}


class ResponsesBody(TokenChoice):
    """Text or items of a conversation, and how it is to be answered."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    return_token_ids: bool | None = None
    return_origins: bool | None = None
    metadata: dict[str, str] | None = None  # given back as it is
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    service_tier: str | None = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None  # one that OpenAI has stored
    stream_options: Any = None

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "max_tool_calls": (),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "stream_options": (),
    }
