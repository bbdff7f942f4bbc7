"""Served models whose templates have tools or reasoning parts, with one token for the marker; answers to order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.invoking import save_model
from tests.serving import Served, served
from tests.vocabularies import TEMPLATE

# What `auto` recognises as the style of Hermes and Qwen.
TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}" + TEMPLATE
)
MARKER = "<tool_call>"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@contextmanager
def served_with_tools(folder: Path) -> Iterator[tuple[Served, int]]:
    """A server whose model has tools in the style of Hermes, and the id of their marker."""
    with _served(folder, TOOLS, MARKER) as running:
        yield running


@contextmanager
def served_with_thoughts(folder: Path) -> Iterator[tuple[Served, int]]:
    """A server whose model begins with a reasoning part, and the id of its end."""
    template = TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}{# </think> #}")
    with _served(folder, template, "</think>") as running:
        yield running


@contextmanager
def _served(folder: Path, template: str, marker: str) -> Iterator[tuple[Served, int]]:
    """The marker is one token, and as in the models that have one, no special token."""
    path = save_model(folder, template=template, extra=marker)
    written = json.loads((path / "tokenizer.json").read_text())
    (token,) = [token for token in written["added_tokens"] if token["content"] == marker]
    token["special"] = False
    (path / "tokenizer.json").write_text(json.dumps(written))
    with served(str(path), speculate="grammar+prediction+suffix") as server:
        yield server, token["id"]


def written_call(arguments: dict[str, Any], name: str = "weather") -> str:
    """A call as models write it."""
    return f'{MARKER}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def saying(text: str) -> dict[str, Any]:
    """The fields of a body that make any model say this."""
    return {"structured_outputs": {"choice": [text]}}
