"""Prompts from a file, and what a model makes of them.

A `.txt` file has one prompt a line. In a `.jsonl` file a line is an object with `prompt`, `question` or `text` (a
text), `instruction` (a text, with what is in `input` below it), `turns` (one after the other, each when the one before
is answered) or `messages` (asked up to the last one of the user).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import CorruptFile, OptionError, PromptError
from slipstream.text import Tokenizer

Conversation = list[dict[str, str]]

_SUFFIXES = (".jsonl", ".txt")


class Dialogue(NamedTuple):
    """What a line asks: a conversation that ends with the user, and what the user says after each answer."""

    asked: Conversation
    later: tuple[str, ...] = ()


def question(text: str) -> Conversation:
    """A lone message of a user."""
    return [{"role": "user", "content": text}]


def read_prompts(path: Path) -> list[Conversation]:
    """What is asked first in each line of a file."""
    return [dialogue.asked for dialogue in read_dialogues(path)]


def read_dialogues(path: Path) -> list[Dialogue]:
    """The lines of a file; whatever is wrong with one is told with its number."""
    if path.suffix not in _SUFFIXES:
        raise OptionError(f"{str(path)!r} is no file of prompts", hint=f"valid: {', '.join(_SUFFIXES)}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other signs that end lines may stand in JSON
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{str(path)!r} is not UTF-8: {error.reason} at byte {error.start}") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{str(path)!r} has no prompts")
    if path.suffix == ".txt":
        return [Dialogue(question(line)) for _, line in numbered]
    return [_dialogue(f"{str(path)!r} line {number}", line) for number, line in numbered]


def _dialogue(place: str, line: str) -> Dialogue:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise CorruptFile(f"{place} is not JSON: {what}") from None
    for name, read in _FIELDS.items():
        if isinstance(entry, Mapping) and name in entry:
            found = read(entry[name], entry)
            if found is None:
                raise CorruptFile(f"{place}: there is no prompt in {name!r}")
            return found
    raise CorruptFile(f"{place} has no prompt", hint=f"one of {', '.join(_FIELDS)} is needed")


Entry = Mapping[str, Any]


def _text(value: Any, entry: Entry) -> Dialogue | None:
    return Dialogue(question(value)) if isinstance(value, str) and value.strip() else None


def _instruction(value: Any, entry: Entry) -> Dialogue | None:
    below = entry.get("input")
    if isinstance(value, str) and isinstance(below, str) and below.strip():
        value = f"{value}\n\n{below}"
    return _text(value, entry)


def _turns(value: Any, entry: Entry) -> Dialogue | None:
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(turn, str) and turn.strip() for turn in value):
        return None
    return Dialogue(question(value[0]), tuple(value[1:]))


def _messages(value: Any, entry: Entry) -> Dialogue | None:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return None
    messages = [{"role": message.get("role"), "content": message.get("content")} for message in value]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    whole = all(isinstance(part, str) for message in messages for part in message.values())
    return Dialogue(messages) if messages and whole else None


_FIELDS: dict[str, Callable[[Any, Entry], Dialogue | None]] = {
    "prompt": _text,
    "question": _text,
    "instruction": _instruction,
    "turns": _turns,
    "messages": _messages,
    "text": _text,
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
