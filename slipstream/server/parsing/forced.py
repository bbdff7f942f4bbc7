"""Calls as a grammar, in the style that their parser reads: those that `tool_choice` demands, and strict ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import OptionError
from slipstream.server.parsing.base import ParserRequest
from slipstream.server.parsing.reasoning import ReasoningStyle
from slipstream.server.parsing.tool_styles import TOOL_STYLES

# What llguidance writes between the parts of an object: as models were trained to, and never endless white space.
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def function_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the given functions; a tool of another kind, or without a name, is refused."""
    return [_function(tool, number)["name"] for number, tool in enumerate(tools)]


def call_grammar(
    style: str | None,
    request: ParserRequest,
    special_ids: Mapping[str, int],
    reasoning: ReasoningStyle | None = None,
) -> str | None:
    """A Lark grammar for `tool_choice` `required` or a named function, or for `auto` with a strict one; else None.

    With `auto` the answer is free text up to the style's marker. From there on it must be a call: by its schema if the
    function is strict, else with any arguments. Markers that are special tokens are matched by id, as no text spells
    them. `reasoning`: free text does not begin with its tag, which belongs to the part before the answer.
    """
    functions = [_function(tool, number) for number, tool in enumerate(request.tools)]
    forced = _chosen(request.tool_choice, functions)
    if forced is not None and style is None:
        raise OptionError(
            "tool_choice: the served model has no known style of tool calls", hint="--tool-call-parser names one"
        )
    strict = request.tool_choice == "auto" and any(function.get("strict") for function in functions)
    if style is None or (forced is None and not strict):
        return None
    marker = _marker(_MARKERS[style], special_ids)
    bare = style == "llama3_json"  # calls that begin the answer need no marker
    if forced is not None:
        rules = ["start: calls" if bare else f"start: {marker} calls"]
    else:  # lazy: free text ends with the first marker
        marked = f"marked: TEXT {marker}" if marker.startswith("<[") else f"marked[lazy]: TEXT {marker}"
        rules = [f"start: {'calls | ' if bare else ''}marked calls | TEXT", marked, _free_text(reasoning, bare)]
    rules.append(f"calls: {_LAYOUTS[style](request.parallel_tool_calls, special_ids)}")
    return "\n".join([*rules, *_calls(style, functions if forced is None else forced, forced is not None), ""])


def _calls(style: str, functions: list[Mapping[str, Any]], forced: bool) -> list[str]:
    """The rule `call`: one of these functions."""
    rules, key = [], "parameters" if style == "llama3_json" else "arguments"
    for number, function in enumerate(functions):
        opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
        schema = _schema(function) if forced or function.get("strict") else {"type": "object", "x-guidance": SPACING}
        rules += [
            f"call_{number}: {_text(opening)} arguments_{number} {_text('}')}",
            f"arguments_{number}: %json {json.dumps(schema)}",
        ]
    return [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}", *rules]


def _free_text(reasoning: ReasoningStyle | None, bare: bool) -> str:
    """The terminal TEXT: it begins neither with a reasoning part nor, where calls may be `bare`, with an object."""
    text = r"TEXT: /\s*([^{\s](.|\n)*)?/" if bare else r"TEXT: /(.|\n)*/"
    return text if reasoning is None else rf"{text} & ~/\s*{re.escape(reasoning.start)}(.|\n)*/"


# -- what follows a style's marker -------------------------------------------------------------------------------------


def _hermes(several: bool, special_ids: Mapping[str, int]) -> str:
    line = _text("\n")
    one = f"{line} call {line} {_marker('</tool_call>', special_ids)}"
    return f"{one} ({line} {_marker(_MARKERS['hermes'], special_ids)} {one})*" if several else one


def _llama(several: bool, special_ids: Mapping[str, int]) -> str:
    return f"call ({_text('; ')} call)*" if several else "call"


def _mistral(several: bool, special_ids: Mapping[str, int]) -> str:
    more = f" ({_text(', ')} call)*" if several else ""
    return f"{_text('[')} call{more} {_text(']')}"


_LAYOUTS = {"hermes": _hermes, "llama3_json": _llama, "mistral": _mistral}
_MARKERS = {style: parser.marker for style, parser in TOOL_STYLES.items()}


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
