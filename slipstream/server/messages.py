"""Messages of a conversation as chat templates know them."""

from __future__ import annotations

import json
from typing import Any

from slipstream.server.failures import ApiError


def plain_message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """A message as templates know it: `developer` is `system`, and a call's arguments are an object."""
    found = {name: value for name, value in message.items() if value is not None or name == "content"}
    if found.get("role") == "developer":
        found["role"] = "system"
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["content"] = found.get("content") or ""  # templates add it to strings
        found["tool_calls"] = [_plain_call(call, f"messages[{place}].tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _plain_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{name} is no call of a function", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise ApiError(400, f"{name}: the arguments are not JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
