"""The files of a data set: their names and formats, written so that they appear whole or not at all, and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CorruptFile, OptionError

FORMAT, VERSION = "slipstream chats", 1
HEADER = "data.json"
PARTIAL = ".partial"
INDEX = np.dtype(
    [
        ("end", "<u8"),  # where its ids end in the file; they begin where those of the chat before end
        ("item", "<u4"),  # which conversation of the recipe it is
        ("prompt_len", "<u4"),
        ("temperature", "<f4"),  # 0: greedy
        ("source", "<u2"),  # place in data.json's `sources`: where the prompt came from
        ("flags", "<u2"),
        ("signature", "<u8", (4,)),  # of the user's first words (`loops.signature`): finds near-duplicates later
    ]
)
# Flags: the answer was cut where it began to repeat itself; other turns come before the last one; the prompt has a text
# in it that the target wrote before.
CUT, FOLLOWED, ABOUT = 1, 2, 4
REMAKE = "delete the directory and make it again: slipstream synth -o DIR"


def tokens_file(shard: int) -> str:
    """The name of a shard's ids."""
    return f"tokens-{shard:05d}.bin"


def index_file(shard: int) -> str:
    """The name of a shard's index."""
    return f"index-{shard:05d}.bin"


def token_bytes(vocab_size: int) -> int:
    """Bytes of an id on disk."""
    return 2 if vocab_size <= 1 << 16 else 4


def shard_sizes(description: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(chats, tokens) of each shard."""
    return [(shard["chats"], shard["tokens"]) for shard in description["shards"]]


def write_file(path: Path, content: bytes) -> None:
    """A file appears whole or not at all, and stays when the power goes."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_empty(directory: Path) -> None:
    """Refuse a directory in which somebody keeps something else."""
    others = sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(PARTIAL))
    if others:
        what = f"{str(directory)!r} is no data set and is left alone: it has {others[0]!r}"
        raise OptionError(what, hint="name another directory")


def mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """A file of so many entries, where it lies."""
    size = path.stat().st_size if path.is_file() else 0
    if size != count * dtype.itemsize:
        raise CorruptFile(f"{str(path)!r} has {size} bytes, expected {count * dtype.itemsize}", hint=REMAKE)
    return np.memmap(path, dtype, mode="r")


def read_header(directory: Path) -> dict[str, Any]:
    """What `data.json` says; whatever cannot be is refused."""
    path = directory / HEADER
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {HEADER}" if directory.is_dir() else "is no directory"
        raise OptionError(f"no data set: {str(directory)!r} {what}", hint="make one: slipstream synth -o DIR") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}", hint=REMAKE) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptFile(f"{str(path)!r} does not describe a data set", hint=REMAKE)
    if content.get("version") != VERSION:
        found = f"version {content.get('version')!r} of the format"
        raise CorruptFile(f"{str(path)!r} is {found}, and version {VERSION} is read here", hint=REMAKE)
    for name, valid in _VALID.items():
        if not valid(content.get(name)):
            raise CorruptFile(f"{str(path)!r} has no valid {name!r}", hint=REMAKE)
    return content


def _positive(value: object) -> bool:
    return type(value) is int and value >= 1


def _counted(counts: object) -> bool:
    names = ("items", "kept", "cut", "tokens", "answer_tokens")
    if not isinstance(counts, dict) or not isinstance(counts.get("dropped"), dict):
        return False
    return all(type(count) is int and count >= 0 for count in map(counts.get, names))


def _sharded(shards: object) -> bool:
    if not isinstance(shards, list):
        return False
    return all(isinstance(s, dict) and _positive(s.get("chats")) and _positive(s.get("tokens")) for s in shards)


_VALID: dict[str, Callable[[Any], bool]] = {
    "fingerprint": lambda value: isinstance(value, str),
    "tokenizer": lambda value: isinstance(value, str),
    "vocab_size": _positive,
    "token_bytes": lambda value: value in (2, 4),
    "arguments": lambda value: isinstance(value, dict),
    "sources": lambda value: isinstance(value, list),
    "counts": _counted,
    "shards": _sharded,
}
