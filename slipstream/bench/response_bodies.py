"""A request body of `/v1/responses` as one of `/v1/chat/completions`: the same question in other words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import PromptError

Body = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_INERT: dict[str, Any] = {"store": False, "truncation": "disabled", "background": False}  # values that change no answer


def as_chat(body: Mapping[str, Any]) -> Body:
    """The body of a chat; fields that it does not know keep their names, and are judged like those of any chat."""
    rest = {name: value for name, value in body.items() if value is not None and _INERT.get(name, ...) != value}
    found: Body = {"messages": _messages(rest.pop("instructions", None), rest.pop("input"))}
    if "max_output_tokens" in rest:
        found["max_completion_tokens"] = rest.pop("max_output_tokens")
    thinking = _settings(rest, "reasoning", {"effort"})
    if "effort" in thinking:
        found["reasoning_effort"] = thinking["effort"]
    form = _settings(rest, "text", {"format"}).get("format")
    if form is not None:
        wanted = dict(form) if isinstance(form, Mapping) else {}
        kind = wanted.pop("type", None)
        found["response_format"] = {"type": kind, **({"json_schema": wanted} if kind == "json_schema" else {})}
    if isinstance(tools := rest.get("tools"), list):
        rest["tools"] = [_tool(tool) for tool in tools]
    if isinstance(choice := rest.get("tool_choice"), Mapping):
        rest["tool_choice"] = _tool(choice)
    return {**found, **rest}


def _settings(rest: Body, name: str, known: set[str]) -> Mapping[str, Any]:
    """A field that is an object; what is not known in it is refused."""
    given = rest.pop(name, {})
    if not isinstance(given, Mapping):
        raise PromptError(f"{name} is not an object")
    for key, value in given.items():
        if key not in known and value is not None:
            raise PromptError(f"{name}.{key} is not known", hint=f"valid: {', '.join(sorted(known))}")
    return {key: value for key, value in given.items() if value is not None}


def _tool(tool: Any) -> Any:
    """Functions are flat in one API, and nested in the other."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise PromptError(f"tools: {tool!r} is not a function")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(instructions: Any, said: Any) -> list[Body]:
    messages: list[Body] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(said, str):
        return [*messages, {"role": "user", "content": said}]
    if not isinstance(said, list) or not all(isinstance(item, Mapping) for item in said):
        raise PromptError("input is neither a text nor a list of items")
    for place, item in enumerate(said):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), place)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), place)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise PromptError(f"input[{place}]: items of type {kind!r} are not understood")
    return messages


def _text(content: Any, place: int) -> str:
    """A text, or the texts of its parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise PromptError(f"input[{place}] has no text")
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)):
            raise PromptError(f"input[{place}] has a part that is not text")
    return "\n".join(part["text"] for part in parts)
