"""Reads prompts from a file, and encodes them.

A `.txt` file has one prompt per line. In a `.jsonl` file a line is an object with `prompt`, `question` or `text` (a
string), `instruction` (a string, followed by that in `input`), `turns` (asked one after the other, each after the
previous answer) or `messages` (up to the user's last one).
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
    """The request of a line: a conversation that ends with the user, and the user's turns after each answer."""

    asked: Conversation
    later: tuple[str, ...] = ()


def question(text: str) -> Conversation:
    """A single user message."""
    return [{"role": "user", "content": text}]


def read_prompts(path: Path) -> list[Conversation]:
    """The first request of each line of a file."""
    return [dialogue.asked for dialogue in read_dialogues(path)]


def file_lines(path: Path) -> list[str]:
    """The lines of a file of prompts."""
    if path.suffix not in _SUFFIXES:
        raise OptionError(f"{str(path)!r} is not a file of prompts", hint=f"valid: {', '.join(_SUFFIXES)}")
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # other line separators may occur in JSON
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{str(path)!r} is not UTF-8: {error.reason} at byte {error.start}") from None


def read_dialogues(path: Path) -> list[Dialogue]:
    """The lines of a file; an error names the line by its number."""
    lines = file_lines(path)
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
    return read_entry(entry, place)


Entry = Mapping[str, Any]


def read_entry(entry: object, place: str = "the line") -> Dialogue:
    """The request of one object; `place`: what errors call it."""
    for name, read in _FIELDS.items():
        if isinstance(entry, Mapping) and name in entry:
            found = read(entry[name], entry)
            if found is None:
                raise CorruptFile(f"{place}: there is no prompt in {name!r}")
            return found
    raise CorruptFile(f"{place} has no prompt", hint=f"one of {', '.join(_FIELDS)} is needed")


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
    """Token ids, by the chat template if there is one."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(conversation)
    if len(conversation) > 1:
        raise PromptError("the model has no chat template and a prompt has several messages")
    return tokenizer.encode(conversation[0]["content"])


def spread(prompts: Sequence[list[int]], most: int) -> list[list[int]]:
    """At most `most` of them, evenly spread."""
    if len(prompts) <= most:
        return list(prompts)
    return [prompts[index * len(prompts) // most] for index in range(most)]
