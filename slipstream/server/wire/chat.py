"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from slipstream.server.wire.common import Body, SamplingBody


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of a function."""

    name: str


class NamedToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class TextPart(Body):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """A text that the answer is expected to resemble; it becomes a drafter."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole predicted text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatBody(SamplingBody):
    """A conversation, and how it is to be answered. Messages are those of the model's chat template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None  # a variable of the chat template
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None  # a variable of the chat template
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None  # says who asks; nothing depends on it
    prompt_cache_key: str | None = None  # a hint; prefixes are always kept
    metadata: dict[str, str] | None = None  # for stored answers; none are stored

    add_special_tokens: bool | None = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None  # a template is code: only the model's own is run

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingBody.inert,
        "add_special_tokens": (False,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "include_reasoning": (True,),
        "audio": (),
        "web_search_options": (),
        "functions": (),
        "function_call": (),
        "chat_template": (),
    }
