"""Training data on disk: conversations written by a target, as token ids. docs/data.md describes the format.

A data set is a directory. `data.json` describes it; each shard is two files:

    tokens-00000.bin   the ids of the chats, one after the other; 2 or 4 bytes each, little-endian
    index-00000.bin    one entry per chat (`data_files.INDEX`)

A shard counts when `data.json` names it. Files appear atomically, `data.json` last, so a killed process loses only the
shard that was being written.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream import __version__
from slipstream.errors import CorruptFile, OptionError
from slipstream.train.data_files import (
    CUT,
    FORMAT,
    HEADER,
    INDEX,
    REMAKE,
    VERSION,
    data_sets,
    index_file,
    mapped,
    read_header,
    require_empty,
    shard_sizes,
    token_bytes,
    tokens_file,
    write_file,
)

Ids = npt.NDArray[np.int64]

_IDENTIFYING = 4096  # tokens of a shard that, with its index, identify it


@dataclass(frozen=True)
class Chat:
    """A conversation that ends with an answer of the target. The prompt is everything before that answer."""

    tokens: Ids  # [length], prompt and answer
    prompt_len: int  # tokens that are not the target's answer
    sampled: bool  # False: the answer is greedy


class ChatData:
    """One or more data sets of one target (or folders of them), memory-mapped. CorruptFile or OptionError if they
    cannot be used.

    `description`: where the chats come from, and their counts.
    """

    def __init__(self, directory: Path, *more: Path) -> None:
        parts = {place: read_header(place) for each in (directory, *more) for place in data_sets(each)}
        first = next(iter(parts.values()))
        self.fingerprint: str = first["fingerprint"]
        self.vocab_size: int = first["vocab_size"]
        for place, part in parts.items():
            if (part["fingerprint"], part["vocab_size"]) != (self.fingerprint, self.vocab_size):
                raise OptionError(f"{str(place)!r} and {str(directory)!r} were written by different models")
            if not part["shards"]:
                raise CorruptFile(f"{str(place / HEADER)!r} names no chats yet", hint="let slipstream synth finish")
        self.description = first if len(parts) == 1 else _together(list(parts.values()))
        self._shards = [
            _Shard(place, number, part) for place, part in parts.items() for number in range(len(part["shards"]))
        ]
        self._ends = list(accumulate(len(shard.index) for shard in self._shards))

    @property
    def shards(self) -> list[str]:
        """What identifies the shards, in order."""
        return [shard.key for shard in self._shards]

    def begin_with(self, known: Sequence[str]) -> None:
        """Put these shards first, in this order, so that their chats keep their numbers; OptionError if one is gone."""
        found = {shard.key: shard for shard in self._shards}
        if missing := [key for key in known if key not in found]:
            raise OptionError(
                f"{len(missing)} of the {len(known)} shards that were learnt from before are not in the data",
                hint="give all data again, the old and the new",
            )
        self._shards = [found.pop(key) for key in known] + list(found.values())
        self._ends = list(accumulate(len(shard.index) for shard in self._shards))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Chat:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no chat {index}: there are {len(self)}")
        shard = bisect_right(self._ends, index)
        return self._shards[shard].chat(index - (self._ends[shard - 1] if shard else 0), self.vocab_size)


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several data sets described as one."""
    sums = {name: sum(part["counts"][name] for part in parts) for name in ("kept", "tokens", "answer_tokens")}
    said = {name: [part.get(name) for part in parts] for name in ("created", "arguments")}
    return {"model": parts[0].get("model"), "counts": sums, **said}


class _Shard:
    """The two files of a shard. Invalid files are refused when opened, invalid ids when read."""

    def __init__(self, directory: Path, number: int, description: Mapping[str, Any]) -> None:
        chats, tokens = shard_sizes(description)[number]
        self._path = directory / tokens_file(number)
        self._tokens = mapped(self._path, np.dtype(f"<u{description['token_bytes']}"), tokens)
        path = directory / index_file(number)
        self.index = mapped(path, INDEX, chats)
        lengths = np.diff(self.index["end"].astype(np.int64), prepend=0)
        prompts = self.index["prompt_len"]
        if self.index["end"][-1] != tokens or not ((prompts >= 1) & (prompts < lengths)).all():
            raise CorruptFile(f"{str(path)!r} is corrupt: its lengths are impossible", hint=REMAKE)

    @property
    def key(self) -> str:
        """Identifies the shard wherever it lies."""
        beginning = self._tokens[:_IDENTIFYING].tobytes()
        return hashlib.sha256(self.index.tobytes() + beginning).hexdigest()[:16]

    def chat(self, index: int, vocab_size: int) -> Chat:
        entry = self.index[index]
        start = int(self.index["end"][index - 1]) if index else 0
        tokens = self._tokens[start : int(entry["end"])].astype(np.int64)
        if tokens.max() >= vocab_size:
            raise CorruptFile(f"{str(self._path)!r} is corrupt: there is no token {tokens.max()}", hint=REMAKE)
        return Chat(tokens, int(entry["prompt_len"]), bool(entry["temperature"] > 0))


class ChatWriter:
    """Writes a data set, or continues one; a context manager.

    Chats are appended and, with `commit`, become a shard. `items` counts the conversations processed, kept or dropped:
    a continued data set starts there. `arguments`, `sources`, `tokenizer` and `fingerprint` must then be the same;
    OptionError names a difference. Leaving the context commits what was appended; after an error it is discarded.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: str,
        vocab_size: int,
        tokenizer: str = "",
        model: str = "",
        arguments: Mapping[str, Any] | None = None,
        sources: Sequence[str] = (),
        private: bool = False,
    ) -> None:
        """`private`: its files are for their owner alone."""
        self._directory = directory
        self._private = private
        self._description: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "token_bytes": token_bytes(vocab_size),
            "model": model,
            "arguments": dict(arguments or {}),
            "sources": list(sources),
            "slipstream": __version__,
            "torch": str(torch.__version__),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "counts": {"items": 0, "kept": 0, "dropped": {}, "cut": 0, "tokens": 0, "answer_tokens": 0},
            "shards": [],
        }
        self._tokens: list[npt.NDArray[Any]] = []
        self._entries: list[tuple[Any, ...]] = []
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / HEADER).exists():
            self._continue()
        else:
            require_empty(directory)
            self._write_header()

    @property
    def items(self) -> int:
        """Conversations processed: kept or dropped, and on disk."""
        return int(self._counts["items"])

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of `data.json`."""
        return {**self._counts, "dropped": dict(self._counts["dropped"])}

    @property
    def _counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = self._description["counts"]
        return counts

    @property
    def shards(self) -> int:
        """How many shards are on disk."""
        return len(self._description["shards"])

    def signatures(self) -> Iterator[npt.NDArray[np.uint64]]:
        """The signatures [4] of the chats on disk, in order."""
        for number, (chats, _) in enumerate(shard_sizes(self._description)):
            yield from mapped(self._directory / index_file(number), INDEX, chats)["signature"]

    def append(
        self,
        tokens: Sequence[int] | Ids,
        prompt_len: int,
        *,
        temperature: float = 0.0,
        item: int = 0,
        source: int = 0,
        flags: int = 0,
        signature: Sequence[int] | npt.NDArray[np.uint64] = (0, 0, 0, 0),
    ) -> None:
        """Add a chat to the shard that `commit` will write."""
        ids = np.asarray(tokens, np.int64)
        if not 1 <= prompt_len < len(ids):
            raise ValueError(f"a chat of {len(ids)} tokens cannot have a prompt of {prompt_len}")
        if ids.min() < 0 or ids.max() >= self._description["vocab_size"]:
            raise ValueError(f"a token is outside the vocabulary of {self._description['vocab_size']}")
        self._tokens.append(ids.astype(f"<u{self._description['token_bytes']}"))
        self._entries.append((0, item, prompt_len, temperature, source, flags, tuple(int(s) for s in signature)))

    def commit(self, items: int, dropped: Mapping[str, int] | None = None) -> None:
        """Write what was appended as a shard, synced to disk. `items`: conversations in it, dropped ones included."""
        index = np.array(self._entries, INDEX)
        lengths = np.array([len(tokens) for tokens in self._tokens], np.int64)
        index["end"] = np.cumsum(lengths)
        if len(index):
            number = self.shards
            self._write(tokens_file(number), np.concatenate(self._tokens).tobytes())
            self._write(index_file(number), index.tobytes())
            self._description["shards"].append({"chats": len(index), "tokens": int(lengths.sum())})
        counts = self._counts
        counts["items"] += items
        counts["kept"] += len(index)
        counts["cut"] += int((index["flags"] & CUT != 0).sum())
        counts["tokens"] += int(lengths.sum())
        counts["answer_tokens"] += int(lengths.sum() - index["prompt_len"].sum(dtype=np.int64))
        for reason, count in (dropped or {}).items():
            counts["dropped"][reason] = counts["dropped"].get(reason, 0) + count
        self._tokens, self._entries = [], []
        self._write_header()

    def close(self) -> None:
        """Commit what is left."""
        if self._entries:
            self.commit(len(self._entries))

    def __enter__(self) -> ChatWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()

    def _write_header(self) -> None:
        self._write(HEADER, (json.dumps(self._description, indent=1) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        write_file(self._directory / name, content, private=self._private)

    def _continue(self) -> None:
        """Continue the data set in the directory, if its arguments are the same."""
        found, wanted = read_header(self._directory), self._description
        pairs = [(name, found[name], wanted[name]) for name in ("fingerprint", "tokenizer", "vocab_size")]
        for name in sorted({*found["arguments"], *wanted["arguments"]}):
            pairs.append((name, found["arguments"].get(name), wanted["arguments"].get(name)))
        pairs.append(("sources", found["sources"], wanted["sources"]))  # another recipe changes them too
        for name, old, new in pairs:
            if old != new:
                raise OptionError(
                    f"{str(self._directory)!r} was made with {name}={old!r}, but now it is {new!r}",
                    hint="continue with the same arguments, or name another directory",
                )
        for number in range(len(found["shards"])):
            _Shard(self._directory, number, found)
        self._description = found
