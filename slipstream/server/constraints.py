"""What an answer must look like, from the several ways in which clients say it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from slipstream.server.failures import ApiError
from slipstream.server.wire.chat import ChatBody
from slipstream.server.wire.common import ResponseFormat, SamplingBody
from slipstream.types import SamplingParams

_KNOWN = {field.name for field in fields(SamplingParams)}


def constraints(body: SamplingBody) -> dict[str, Any]:
    """`structured_outputs` of SamplingParams, from the field of that name or `response_format`."""
    wanted = _structured(body) if body.structured_outputs is not None else _format(body.response_format)
    if body.structured_outputs is not None and _format(body.response_format):
        raise ApiError(400, "give either structured_outputs or response_format", param="response_format")
    return _supported("structured_outputs", wanted, "response_format" if body.structured_outputs is None else None)


def chat_constraints(body: ChatBody) -> dict[str, Any]:
    """The same for a chat, with what a tool choice demands, and the predicted text."""
    if body.tool_choice not in (None, "none", "auto"):
        if not body.tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        raise ApiError(400, f"tool_choice={body.tool_choice!r} is not supported here", param="tool_choice")
    predicted = _supported("prediction", body.prediction.text if body.prediction is not None else None)
    return constraints(body) | predicted


def _structured(body: SamplingBody) -> dict[str, Any]:
    assert body.structured_outputs is not None
    given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    if len(given) != 1:
        said = ", ".join(given) or "nothing"
        raise ApiError(400, f"structured_outputs has {said}: give exactly one kind", param="structured_outputs")
    return given


def _format(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(400, "response_format: json_schema has no schema", param="response_format")
    return {"json": wanted.json_schema.schema_}


def _supported(name: str, value: Any, param: str | None = None) -> dict[str, Any]:
    if not value:
        return {}
    if name not in _KNOWN:
        raise ApiError(400, f"{param or name} is not supported here", param=param or name)
    return {name: value}
