"""`tool_choice` as a grammar: calls that the model must write, in the style that its parser reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import OptionError
from slipstream.server.parsing.base import ParserRequest

# What llguidance writes between the parts of an object: as models were trained to, and never endless white space.
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def function_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the given functions; a tool of another kind, or without a name, is refused."""
    return [_function(tool, number)["name"] for number, tool in enumerate(tools)]


def forced_calls(style: str | None, request: ParserRequest, special_ids: Mapping[str, int]) -> str | None:
    """A Lark grammar for `tool_choice` `required` or a named function; None for `auto` and `none`.

    Markers that are special tokens are matched by id, as no text spells them.
    """
    functions = [_function(tool, number) for number, tool in enumerate(request.tools)]
    forced = _chosen(request.tool_choice, functions)
    if forced is None:
        return None
    if style is None:
        raise OptionError(
            "tool_choice: the served model has no known style of tool calls", hint="--tool-call-parser names one"
        )
    rules, key = [], "parameters" if style == "llama3_json" else "arguments"
    for number, function in enumerate(forced):
        opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
        rules += [
            f"call_{number}: {_text(opening)} arguments_{number} {_text('}')}",
            f"arguments_{number}: %json {json.dumps(_schema(function))}",
        ]
    several = request.parallel_tool_calls
    start = _LAYOUTS[style](several, special_ids)
    calls = " | ".join(f"call_{number}" for number in range(len(forced)))
    return "\n".join([f"start: {start}", f"call: {calls}", *rules, ""])


def _hermes(several: bool, special_ids: Mapping[str, int]) -> str:
    one = f"{_marker('<tool_call>', special_ids)} {_text(chr(10))} call {_text(chr(10))} "
    one += _marker("</tool_call>", special_ids)
    return f"{one} ({_text(chr(10))} {one})*" if several else one


def _llama(several: bool, special_ids: Mapping[str, int]) -> str:
    return f"call ({_text('; ')} call)*" if several else "call"


def _mistral(several: bool, special_ids: Mapping[str, int]) -> str:
    more = f" ({_text(', ')} call)*" if several else ""
    return f"{_marker('[TOOL_CALLS]', special_ids)} {_text('[')} call{more} {_text(']')}"


_LAYOUTS = {"hermes": _hermes, "llama3_json": _llama, "mistral": _mistral}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(marker: str, special_ids: Mapping[str, int]) -> str:
    return f"<[{special_ids[marker]}]>" if marker in special_ids else _text(marker)


def _chosen(choice: str | Mapping[str, Any], functions: list[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The functions of which one must be called; None if none must."""
    if choice in ("auto", "none"):
        return None
    if choice == "required":
        if not functions:
            raise OptionError("tool_choice is 'required', but there are no tools")
        return functions
    name = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        valid = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise OptionError(f"tool_choice {choice!r} is not understood", hint=valid)
    named = [function for function in functions if function["name"] == name]
    if not named:
        raise OptionError(f"tool_choice names {name!r}, which is not among the tools")
    return named[:1]


def _function(tool: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The function of a tool, in the form of chats or that of responses."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise OptionError(f"tools[{number}] is not a function", hint="only tools of type 'function' are understood")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise OptionError(f"tools[{number}] has no name")
    return function


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: always an object."""
    schema = function.get("parameters") or {}
    if not isinstance(schema, Mapping):
        raise OptionError(f"the parameters of function {function['name']!r} are not a JSON schema")
    return {"type": "object", **schema, "x-guidance": SPACING}
