"""Fields that several routes share. All are optional: None means the default, as clients send it.

Names are OpenAI's, and vLLM's where OpenAI has none. A field that is not declared is refused; `INERT` lists fields of
OpenAI that are accepted only with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.server.failures import ApiError


class Body(BaseModel):
    """The body of a request. Types are strict: a number in a string is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def refuse_inert(self) -> None:
        """Refuse what cannot be honoured, by name."""
        for name, accepted in self.inert.items():
            value = getattr(self, name)
            if value is not None and value not in accepted:
                valid = f" (valid: {', '.join(map(repr, accepted))})" if accepted else ""
                raise ApiError(400, f"{name} is not supported here{valid}", param=name)


class StreamOptions(Body):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis, which OpenAI adds

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


class StructuredOutputs(Body):
    """What the answer must look like; exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`text`, `json_object`, or `json_schema` with its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TokenChoice(Body):
    """How tokens are chosen, and where an answer ends: the same on every route."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    speculate: bool | str | dict[str, Any] | None = None  # false: plain decoding; a drafter that is loaded
    priority: int | None = None  # lower runs earlier
    stream: bool | None = None
    user: str | None = None  # says who asks; nothing depends on it


class SamplingBody(TokenChoice):
    """How tokens are chosen in chats and completions, and what is reported with an answer."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_origins: bool | None = None  # with each token, the drafter that made it
    return_trees: bool | None = None  # with each step, the tree that was drafted

    # Accepted where they ask for nothing: clients of vLLM and OpenAI send them with these values.
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "spaces_between_special_tokens": (True,),
    }
