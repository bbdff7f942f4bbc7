"""A served model with the template of Hermes' tool calls, one token for the marker, and answers that can be chosen."""

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
def served_with_tools(folder: Path, template: str = TOOLS, **options: Any) -> Iterator[tuple[Served, int]]:
    """The server, and the id of the marker: as in the models that have one, it is no special token."""
    path = save_model(folder, template=template, extra=MARKER)
    written = json.loads((path / "tokenizer.json").read_text())
    (marker,) = [token for token in written["added_tokens"] if token["content"] == MARKER]
    marker["special"] = False
    (path / "tokenizer.json").write_text(json.dumps(written))
    with served(str(path), **{"speculate": "grammar+prediction+suffix", **options}) as server:
        yield server, marker["id"]


def written_call(arguments: dict[str, Any], name: str = "weather") -> str:
    """A call as models write it."""
    return f'{MARKER}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def saying(text: str) -> dict[str, Any]:
    """The fields of a body that make any model say this."""
    return {"structured_outputs": {"choice": [text]}}
