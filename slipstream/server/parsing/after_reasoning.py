"""A grammar that begins where the reasoning part ends: the reasoning is free text, the answer is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slipstream.errors import OptionError
from slipstream.server.parsing.forced import SPACING
from slipstream.server.parsing.reasoning import ReasoningStyle, begins_inside

_START = re.compile(r"^start(?=\s*:)", re.M)
_ANYTHING = r"/(.|\n)*/"
_SPACE = r"/[ \n]{0,4}/"  # between the end of the part and the answer; never endless


def after_reasoning(
    wanted: dict[str, Any], style: ReasoningStyle | None, prompt_end: str, special_ids: Mapping[str, int]
) -> dict[str, Any]:
    """`structured_outputs` that hold from the end of the reasoning part on.

    A part that the prompt opens must be closed first; one that it has closed is over; otherwise the model may open one.
    `special_ids`: ids of the special tokens, by their text.
    """
    if style is None or prompt_end.rstrip().endswith(style.end):
        return wanted
    start, end = (f"<[{special_ids[tag]}]>" if tag in special_ids else None for tag in (style.start, style.end))
    thought = f"thought: {_ANYTHING} {end}" if end else f"thought[suffix={json.dumps(style.end)}]: {_ANYTHING}"
    opened = f"{start or json.dumps(style.start)} thought"
    before = "thought" if begins_inside(style, prompt_end) else f"({opened})?"
    return {"grammar": "\n".join([f"start: {before} {_SPACE} answer", thought, *_rules(wanted), ""])}


def _rules(wanted: dict[str, Any]) -> list[str]:
    """The rule `answer`, and those that it needs."""
    ((kind, value),) = wanted.items()
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else json.loads(value) if isinstance(value, str) else value
        return [f"answer: %json {json.dumps({**schema, 'x-guidance': SPACING})}"]
    if kind == "choice":
        return [f"answer: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in value)}"]
    if kind == "regex":
        return ["answer: /" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value) + "/"]
    if not _START.search(value):
        raise OptionError("structured_outputs: the grammar has no rule start, so it cannot begin after the reasoning")
    return [_START.sub("answer", value)]
