"""The files of a data set: names and formats, atomic writes, checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CorruptFile, OptionError
from slipstream.folders import HeaderFile

FORMAT, VERSION = "slipstream chats", 1
HEADER = "data.json"
PARTIAL = ".partial"
INDEX = np.dtype(
    [
        ("end", "<u8"),  # end of its ids in the file; they start at the end of the previous chat's
        ("item", "<u4"),  # number of the conversation in the recipe
        ("prompt_len", "<u4"),
        ("temperature", "<f4"),  # 0: greedy
        ("source", "<u2"),  # index into data.json's `sources`: where the prompt came from
        ("flags", "<u2"),
        ("signature", "<u8", (4,)),  # of the user's first words (`loops.signature`), for near-duplicates
    ]
)
# Flags: the answer was cut where it started to repeat itself; the prompt has earlier turns; the prompt contains a text
# that the target wrote before.
CUT, FOLLOWED, ABOUT = 1, 2, 4
REMAKE = "delete the directory and make it again: slipstream synth -o DIR"
_FILE = HeaderFile(HEADER, "data set", FORMAT, VERSION, "slipstream synth -o DIR", REMAKE)


def tokens_file(shard: int) -> str:
    """The file name of a shard's ids."""
    return f"tokens-{shard:05d}.bin"


def index_file(shard: int) -> str:
    """The file name of a shard's index."""
    return f"index-{shard:05d}.bin"


def token_bytes(vocab_size: int) -> int:
    """Bytes of an id on disk."""
    return 2 if vocab_size <= 1 << 16 else 4


def shard_sizes(description: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(chats, tokens) of each shard."""
    return [(shard["chats"], shard["tokens"]) for shard in description["shards"]]


def data_sets(directory: Path) -> list[Path]:
    """The data set at this place, or those in it, oldest first: what a server captures is a folder of them."""
    if (directory / HEADER).exists():
        return [directory]
    return sorted(path.parent for path in directory.glob(f"*/{index_file(0)}")) or [directory]


def write_file(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file atomically and sync it to disk; `private`: for its owner alone."""
    partial = path.with_name(path.name + PARTIAL)
    mode = 0o600 if private else 0o666
    with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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
    """Refuse a directory with other files in it."""
    others = sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(PARTIAL))
    if others:
        what = f"{str(directory)!r} is not a data set and is left alone: it has {others[0]!r}"
        raise OptionError(what, hint="name another directory")


def mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """A memory-mapped file of so many entries."""
    size = path.stat().st_size if path.is_file() else 0
    if size != count * dtype.itemsize:
        raise CorruptFile(f"{str(path)!r} has {size} bytes, expected {count * dtype.itemsize}", hint=REMAKE)
    return np.memmap(path, dtype, mode="r")


def read_header(directory: Path) -> dict[str, Any]:
    """The content of `data.json`, checked."""
    path = directory / HEADER
    content = _FILE.read(directory)
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
