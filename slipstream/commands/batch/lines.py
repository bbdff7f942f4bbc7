"""Reads the lines of a file of prompts for `slipstream batch`.

A `.txt` file has one prompt per line. A line of a `.jsonl` file is an object with `prompt` or `messages` and any fields
of `SamplingParams`; or a line of an OpenAI batch, with these in its `body`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.tune.prompts import file_lines
from slipstream.commands.shared.options import adjusted
from slipstream.errors import OptionError, PromptError, SlipstreamError
from slipstream.types import SamplingParams

_NAMES = ("custom_id", "id")  # a line's own id, repeated in its answer
_ENVELOPE = {"method", "url", "body"}  # of a line of an OpenAI batch
_URLS = ("/v1/chat/completions", "/v1/completions")
_IDLE = {"model", "user", "metadata", "store", "service_tier"}  # fields of its body that do not change an answer


@dataclass(frozen=True)
class PromptLine:
    """One line: its request and how to answer it."""

    index: int  # line number in the file, from 0
    custom_id: str | int | None  # its id, if it has one
    messages: list[dict[str, Any]] | None
    prompt: str | None  # plain text, if there are no messages
    params: SamplingParams
    model: str | None = None  # the model that it names

    def digest(self, model: str) -> str:
        """Identifies the request, the model and the parameters, to match answers with lines."""
        said = [model, self.messages, self.prompt, asdict(self.params)]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LineDefaults:
    """Defaults for lines that do not say otherwise."""

    params: SamplingParams
    system: str | None = None
    raw: bool = False  # texts are not messages


def read_lines(path: Path, defaults: LineDefaults) -> tuple[list[PromptLine], list[str]]:
    """The requests of the lines, and the errors of invalid lines, each with its line number."""
    lines = file_lines(path)
    asked, wrong = [], []
    for index, line in enumerate(lines):
        try:
            if line.strip():
                entry = {"prompt": line.rstrip("\r")} if path.suffix == ".txt" else _object(line)
                asked.append(_prompt_line(index, entry, defaults))
        except SlipstreamError as error:
            wrong.append(f"line {index + 1}: {error}")
    if not asked and not wrong:
        raise PromptError(f"{str(path)!r} has no prompts")
    return asked, wrong


def _object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}") from None
    if not isinstance(entry, dict):
        raise PromptError("not a JSON object", hint='as in {"prompt": "Why is the sky blue?"}')
    return entry


def _prompt_line(index: int, entry: dict[str, Any], defaults: LineDefaults) -> PromptLine:
    from slipstream.text.chat import check_messages

    custom_id = next((entry.pop(name) for name in _NAMES if name in entry), None)
    if not isinstance(custom_id, str | int | None):
        raise OptionError(f"custom_id={custom_id!r} is not an id", hint="valid: a text or an integer")
    raw, model = defaults.raw, None
    if "body" in entry:
        if extra := entry.keys() - _ENVELOPE:
            raise OptionError(f"unknown field {min(extra)!r} beside body", hint="put it into body")
        if entry.get("url", _URLS[0]) not in _URLS:
            raise OptionError(f"url {entry['url']!r} is not supported", hint=f"valid: {', '.join(_URLS)}")
        entry, raw = _body(entry["body"]), True  # OpenAI's prompt is plain text
        model = entry.pop("model", None)
        entry = {name: value for name, value in entry.items() if name not in _IDLE}
    if ("prompt" in entry) == ("messages" in entry):
        raise PromptError("either prompt or messages is needed", hint='as in {"prompt": "Why is the sky blue?"}')
    messages = check_messages(entry.pop("messages")) if "messages" in entry else None
    prompt = entry.pop("prompt", None)
    params = adjusted(defaults.params, {name: value for name, value in entry.items() if value is not None})
    if messages is None:
        if not isinstance(prompt, str):
            raise PromptError("the prompt is not a string")
        if not (prompt if raw else prompt.strip()):
            raise PromptError("the prompt is empty")
        messages, prompt = (None, prompt) if raw else ([{"role": "user", "content": prompt}], None)
    if defaults.system is not None and messages is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": defaults.system}, *messages]
    return PromptLine(index, custom_id, messages, prompt, params, model)


def _body(body: Any) -> dict[str, Any]:
    """The body of an OpenAI request in our names."""
    if not isinstance(body, dict):
        raise PromptError("body is not a JSON object")
    entry = dict(body)
    if "max_completion_tokens" in entry:
        entry["max_tokens"] = entry.pop("max_completion_tokens")
    if entry.pop("stream", None):
        raise OptionError("stream: answers of a batch come whole", hint="leave it out")
    if isinstance(entry.get("logprobs"), bool):
        asked, count = entry.pop("logprobs"), entry.pop("top_logprobs", None)
        entry["logprobs"] = (count or 0) if asked else None
    return entry
