"""The answer file of `slipstream batch`: written, continued, and sorted at the end."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from slipstream.errors import OptionError

_BEGINNING = b'{"index": '  # prefix of every answer


class AnswerFile:
    """Answers as JSON lines, each on disk as soon as it is complete. A pipe is only written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plain = self._path.is_file() or not self._path.exists()
        place = self._path if self._path.exists() else self._path.parent
        wanted = os.R_OK | os.W_OK if self._plain else os.W_OK
        if self._path.is_dir() or not self._path.parent.is_dir() or not os.access(place, wanted):
            raise OptionError(f"{str(path)!r} cannot be written", hint="name a file in a directory that exists")

    def answered(self, wanted: dict[int, str]) -> set[int]:
        """The lines already answered here. `wanted`: the digest of each line's request.

        A truncated last line is removed. A file with other content is refused and left unchanged.
        """
        if not self._plain or not self._path.exists():
            return set()
        *lines, last = self._path.read_bytes().split(b"\n")
        found = {self._checked(number, line, wanted) for number, line in enumerate(lines, 1)}
        if last and _is_json(last):  # complete, except for the newline
            found.add(self._checked(len(lines) + 1, last, wanted))
            with self._path.open("ab") as file:
                file.write(b"\n")
        elif last and not last.startswith(_BEGINNING[: len(last)]):
            raise self._refused(f"line {len(lines) + 1} is not an answer of a batch")
        elif last:
            with self._path.open("r+b") as file:
                file.truncate(self._path.stat().st_size - len(last))
        return found

    def _checked(self, number: int, line: bytes, wanted: dict[int, str]) -> int:
        """The index of the prompt that a line answers."""
        try:
            record = json.loads(line)
            index, digest = int(record["index"]), record["request"]
        except (ValueError, TypeError, KeyError):
            raise self._refused(f"line {number} is not an answer of a batch") from None
        if wanted.get(index) != digest:
            raise self._refused(f"line {number} answers another prompt, or with other settings")
        return index

    def _refused(self, why: str) -> OptionError:
        return OptionError(f"{self._path} exists: {why}", hint="name another file, or delete it")

    def _cannot_write(self, error: OSError) -> OptionError:
        return OptionError(f"cannot write {self._path}: {error.strerror or error}")

    def __enter__(self) -> AnswerFile:
        try:
            # half a surrogate pair, possible in a name, is escaped as in JSON
            self._file = self._path.open("a" if self._plain else "w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise self._cannot_write(error) from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Add an answer."""
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._cannot_write(error) from None

    def sort(self) -> None:
        """Sort the answers in the order of their prompts, atomically."""
        if not self._plain:
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        ordered = sorted(lines, key=lambda line: int(json.loads(line)["index"]))
        if ordered != lines:
            place = self._path.resolve()  # a link stays one
            partial = place.with_name(f".{place.name}-{os.getpid()}")
            try:
                partial.write_bytes(b"".join(ordered))
                shutil.copymode(place, partial)
                partial.replace(place)
            finally:
                partial.unlink(missing_ok=True)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
