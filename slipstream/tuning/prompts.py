"""Prompts from a file, and what a model makes of them.

A `.txt` file has one prompt a line. In a `.jsonl` file a line is an object with `prompt` or `question` (a text),
`turns` (the first one is asked; the others would need an answer before them) or `messages` (asked up to the last one of
the user).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, OptionError, PromptError
from slipstream.text import Tokenizer

Conversation = list[dict[str, str]]

_SUFFIXES = (".jsonl", ".txt")


def question(text: str) -> Conversation:
    """A lone message of a user."""
    return [{"role": "user", "content": text}]


def read_prompts(path: Path) -> list[Conversation]:
    """The conversations of a file; whatever is wrong with a line is told with its number."""
    if path.suffix not in _SUFFIXES:
        raise OptionError(f"{str(path)!r} is no file of prompts", hint=f"valid: {', '.join(_SUFFIXES)}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{str(path)!r} is not UTF-8: {error.reason} at byte {error.start}") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{str(path)!r} has no prompts")
    if path.suffix == ".txt":
        return [question(line) for _, line in numbered]
    return [_conversation(f"{str(path)!r} line {number}", line) for number, line in numbered]


def _conversation(place: str, line: str) -> Conversation:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorruptFile(f"{place} is not JSON: {error.msg}") from None
    for name, read in _FIELDS.items():
        if isinstance(entry, Mapping) and name in entry:
            found = read(entry[name])
            if found is None:
                raise CorruptFile(f"{place}: there is no prompt in {name!r}")
            return found
    raise CorruptFile(f"{place} has no prompt", hint=f"one of {', '.join(_FIELDS)} is needed")


def _text(value: Any) -> Conversation | None:
    return question(value) if isinstance(value, str) and value.strip() else None


def _turns(value: Any) -> Conversation | None:
    return _text(value[0]) if isinstance(value, list) and value else None


def _messages(value: Any) -> Conversation | None:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return None
    messages = [{"role": message.get("role"), "content": message.get("content")} for message in value]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    whole = all(isinstance(part, str) for message in messages for part in message.values())
    return messages if messages and whole else None


_FIELDS: dict[str, Callable[[Any], Conversation | None]] = {
    "prompt": _text,
    "question": _text,
    "turns": _turns,
    "messages": _messages,
}


def encode(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Token ids, by the chat template where there is one."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(conversation)
    if len(conversation) > 1:
        raise PromptError("the model has no chat template and a prompt has several messages")
    return tokenizer.encode(conversation[0]["content"])


def spread(prompts: Sequence[list[int]], most: int) -> list[list[int]]:
    """At most so many of them, evenly from beginning to end."""
    if len(prompts) <= most:
        return list(prompts)
    return [prompts[index * len(prompts) // most] for index in range(most)]
