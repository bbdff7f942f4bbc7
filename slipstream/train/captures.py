"""Traffic of a server as training data: a folder of data sets, bounded in size, that survives a kill.

    lock                 held by the server that writes
    00000/               a data set (data.py), readable by its owner alone; the oldest is deleted when space is needed
        served-00000.jsonl   what is known of the chats of a shard beyond their tokens, a line each
        open-00001.jsonl     records that are in no shard yet, the last of them perhaps torn

A folder is for one model, and for one server at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from slipstream.errors import OptionError
from slipstream.train.data import ChatData, ChatWriter
from slipstream.train.data_files import HEADER, data_sets, read_header, write_file
from slipstream.types import Completion, Decision

Record = dict[str, Any]  # prompt_token_ids, token_ids, temperature, and whatever else is known

SHARD_CHATS = 256
_SHARD_S = 600.0  # after so long a shard is written even if it is small
_PARTS = 8  # the folder's size in data sets: what is deleted at a time
_TOKENS = ("prompt_token_ids", "token_ids")
_ARGUMENTS = {"captured": True}


def open_captures(folder: Path) -> IO[str]:
    """Make the folder and lock it; the lock is held until the file is closed. OptionError if that cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _private(folder / "lock", "w")
    except OSError as error:
        raise OptionError(f"{str(folder)!r} cannot be written: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise OptionError(f"another server captures into {str(folder)!r}", hint="name another directory") from None
    return lock


def read_captures(folder: Path) -> Iterator[Record]:
    """The records in the shards of a data set, or of a folder of data sets, oldest first."""
    for place in data_sets(folder):
        data, shards = ChatData(place), len(read_header(place)["shards"])
        facts = (json.loads(line) for shard in range(shards) for line in _lines(place / _served(shard)))
        for number, known in enumerate(facts):
            tokens, prompt_len = data[number].tokens.tolist(), data[number].prompt_len
            yield {**known, "prompt_token_ids": tokens[:prompt_len], "token_ids": tokens[prompt_len:]}


def record_of(prompt_ids: Sequence[int], temperature: float, completion: Completion) -> Record:
    """The record of an answer."""
    stats = completion.stats
    drafters = {*stats.origins, *(name for each in stats.decisions for name in each.drafters)}
    return {
        "prompt_token_ids": list(prompt_ids),
        "token_ids": list(completion.token_ids),
        "temperature": temperature,
        "finish_reason": completion.finish_reason,
        "acceptance": stats.as_dict(),
        "steps": [step for each in stats.decisions for step in _steps(each)],  # those after the first that it decided
        "drafters": sorted(name for name in drafters if name is not None),
    }


def _steps(decision: Decision) -> list[list[int]]:
    """Nodes and tokens of each step. A decision may cover several device rounds: its totals are split evenly."""
    counts = range(decision.steps)
    return [[_part(decision.nodes, i, len(counts)), _part(decision.tokens, i, len(counts))] for i in counts]


def _part(total: int, place: int, count: int) -> int:
    return total * (place + 1) // count - total * place // count


class CaptureStore:
    """Writes records. Whatever fails raises OSError and loses the record; later ones are tried again."""

    def __init__(
        self, folder: Path, most_bytes: int, clock: Callable[[], float] = time.monotonic, **model: Any
    ) -> None:
        """`model`: fingerprint, vocab_size, tokenizer and name, as `ChatWriter` has them."""
        self._folder = folder
        self._most = most_bytes
        self._clock = clock
        self._model = model
        self._records: list[Record] = []  # records in the log that are in no shard yet
        self._since = 0.0  # when the first of these records came
        self._log: IO[str] | None = None
        self._place = next(iter(reversed(_numbered(folder))), folder / f"{0:05d}")
        self._writer = self._write_to(self._place)
        self._recover()

    @property
    def due(self) -> bool:
        """Whether the records so far should become a shard now."""
        if not self._records:
            return False
        size = self._log_file.stat().st_size
        late = self._clock() > self._since + _SHARD_S
        return late or len(self._records) >= SHARD_CHATS or size > self._most // (2 * _PARTS)

    def add(self, record: Record) -> None:
        """Log a record, and write the shard that is due."""
        if len(self._records) >= 2 * SHARD_CHATS:
            self.commit()  # an earlier attempt has failed
        if self._log is None:
            self._log = _private(self._log_file, "a")
        # The line break comes first: a record that was torn by a full disk does not spoil the next one.
        self._log.write("\n" + json.dumps(record, ensure_ascii=False))
        self._log.flush()
        if not self._records:
            self._since = self._clock()
        self._records.append(record)
        if self.due:
            self.commit()

    def commit(self) -> None:
        """Make a shard of the records, and delete the oldest data sets if there are too many."""
        if not self._records:
            return
        try:
            for record in self._records:
                prompt, answer = (record[name] for name in _TOKENS)
                self._writer.append([*prompt, *answer], len(prompt), temperature=record["temperature"])
            lines = [json.dumps({k: v for k, v in r.items() if k not in _TOKENS}) for r in self._records]
            content = "".join(f"{line}\n" for line in lines).encode()
            write_file(self._place / _served(self._writer.shards), content, private=True)
            log = self._log_file
            self._writer.commit(len(self._records))
        except OSError:
            self._writer = self._write_to(self._place)  # without what was appended to it
            raise
        self._records = []
        self._close_log()
        log.unlink(missing_ok=True)
        if _size(self._place) >= self._most // _PARTS:
            self._place = self._folder / f"{int(self._place.name) + 1:05d}"
            self._writer = self._write_to(self._place)
        self._prune()

    def close(self) -> None:
        """Write the remaining records."""
        try:
            self.commit()
        finally:
            self._close_log()

    @property
    def _log_file(self) -> Path:
        return self._place / f"open-{self._writer.shards:05d}.jsonl"

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _write_to(self, place: Path) -> ChatWriter:
        place.mkdir(mode=0o700, exist_ok=True)
        return ChatWriter(place, **self._model, arguments=_ARGUMENTS, sources=("captured",), private=True)

    def _recover(self) -> None:
        """Recover the log of a server that was killed, unless its shard was written."""
        if self._log_file.exists():
            for line in _lines(self._log_file):
                try:
                    self._records.append(json.loads(line))
                except ValueError:
                    continue  # torn
            self._since = self._clock()
            self.commit()
        for stale in self._place.glob("open-*.jsonl"):
            stale.unlink()

    def _prune(self) -> None:
        """Delete the oldest data sets, so that there is room for what comes until the next shard."""
        places = _numbered(self._folder)
        sizes = [_size(place) for place in places]
        while len(places) > 1 and sum(sizes) > self._most - self._most // _PARTS:
            shutil.rmtree(places.pop(0))
            sizes.pop(0)


def _numbered(folder: Path) -> list[Path]:
    """The data sets of a folder, oldest first, those without a shard included."""
    return sorted(path.parent for path in folder.glob(f"*/{HEADER}"))


def _served(shard: int) -> str:
    return f"served-{shard:05d}.jsonl"


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line]


def _size(place: Path) -> int:
    return sum(entry.stat().st_size for entry in place.iterdir())


def _private(path: Path, mode: str) -> IO[str]:
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))
