"""The bodies of `POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from slipstream.server.wire.chat import Tool
from slipstream.server.wire.common import Body


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
