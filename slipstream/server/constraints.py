"""Structured outputs of a request, from the several fields in which clients ask for them."""

from __future__ import annotations

from typing import Any

from slipstream.server.failures import ApiError
from slipstream.server.parsing import Parsing
from slipstream.server.parsing.after_reasoning import after_reasoning
from slipstream.server.parsing.base import ParserRequest
from slipstream.server.wire.common import ResponseFormat, SamplingBody
from slipstream.text import Tokenizer


def constraints(body: SamplingBody) -> dict[str, Any] | None:
    """`structured_outputs` of SamplingParams, from the field of that name or `response_format`."""
    formatted = _format(body.response_format)
    if body.structured_outputs is None:
        return formatted
    if formatted is not None:
        raise ApiError(400, "give either structured_outputs or response_format", param="response_format")
    given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    if len(given) != 1:
        said = ", ".join(given) or "nothing"
        raise ApiError(400, f"structured_outputs has {said}: give exactly one kind", param="structured_outputs")
    return given


def chat_constraints(
    body: SamplingBody, asked: ParserRequest, parsing: Parsing, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """`structured_outputs` of a chat, whose calls may be required or strict; they hold after the reasoning part."""
    wanted = constraints(body)
    special = {tokenizer.token(id) or "": id for id in tokenizer.special_ids}
    forced = parsing.grammar(asked, special)
    if forced is not None and wanted is not None:
        if asked.tool_choice == "auto":
            said = "tools: strict functions cannot be combined with another form of the answer; leave out one of them"
            raise ApiError(400, said, param="tools")
        raise ApiError(400, "tool_choice demands calls, so nothing else can be demanded", param="tool_choice")
    wanted = wanted if forced is None else {"grammar": forced}
    return wanted and after_reasoning(wanted, parsing.reasoning_style, asked.prompt_end, special)


def sent_form(body: SamplingBody) -> dict[str, str]:
    """The field that `structured_outputs` came from, if it has another name: errors about them name that field."""
    if body.structured_outputs is not None:
        return {}
    formatted = body.response_format is not None and body.response_format.type != "text"
    return {"structured_outputs": "response_format" if formatted else "tools"}


def _format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(400, "response_format: json_schema has no schema", param="response_format")
    return {"json": wanted.json_schema.schema_}
