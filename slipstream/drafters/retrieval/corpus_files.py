"""Reads the texts of a corpus: files and directories in, documents as token ids out, in pieces of bounded size.

A text file is one document. Each line of a `.jsonl` file is one: a text, or chat messages, which the model's own
template renders. Files must be UTF-8.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from slipstream.errors import CorruptFile, OptionError
from slipstream.folders import expanded
from slipstream.text import Tokenizer

PIECE = 1 << 18  # characters (bytes, when reading) that are held at a time
_LONGEST = 16  # pieces: a text without a safe place to cut for so long is cut anywhere
_FIELDS = ("text", "messages")  # of a line, unless one is named

_LETTER = r"[^\W\d_]"
# Where every tokenizer that we know begins a new word, whatever the context: at a space between letters.
_SAFE = re.compile(rf"(?s).*{_LETTER}(?= {_LETTER})")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile(r"(?s).*\n(?=\S)")

Bytes = Callable[[int], None]  # called with the number of bytes read since the last call


class NotText(CorruptFile):
    """A file that is not UTF-8."""


@dataclass
class Source:
    """The files of one argument. In directories `survey` drops what is not text; `size` is in bytes."""

    given: str
    files: list[Path]
    is_directory: bool
    skipped: list[Path] = field(default_factory=list)
    size: int = 0


def find_sources(given: Iterable[str], leave_out: Path) -> list[Source]:
    """The files of the given names; directories recursively, in order of their names.

    Hidden entries of directories and the directory `leave_out` are skipped.
    """
    return [_source(name, leave_out.resolve()) for name in given]


def _source(given: str, leave_out: Path) -> Source:
    path = expanded(given)
    try:
        if path.is_dir():
            return Source(given, list(_walk(path, leave_out)), is_directory=True)
        if path.is_file():
            return Source(given, [path], is_directory=False)
        what = "is neither a file nor a directory" if path.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
    raise OptionError(f"{given!r} {what}")


def _walk(folder: Path, leave_out: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.resolve() == leave_out:
            continue
        if entry.is_dir() and not entry.is_symlink():  # a link may be circular
            yield from _walk(entry, leave_out)
        elif entry.is_file():
            yield entry


class Reader:
    """Reads documents for one tokenizer; `key` is the field of `.jsonl` lines."""

    def __init__(self, tokenizer: Tokenizer, key: str | None = None, piece: int = PIECE) -> None:
        self._tokenizer = tokenizer
        self._keys = _FIELDS if key is None else (key,)
        self._piece = piece
        # Some tokenizers put a space before every text, so a piece must not get one of its own.
        apart, joined = (self._encode("a") + self._encode(second) for second in (" b", "b"))
        self._drops_space = apart != self._encode("a b") == joined

    def survey(self, sources: list[Source]) -> None:
        """Read everything once before the build, so that errors in any file are raised now.

        A file that is not text is refused if it was named and skipped if found in a directory; a line of a `.jsonl`
        file without text is refused.
        """
        for source in sources:
            for path in source.files:
                try:
                    for document in self._documents(path, lambda _: None):
                        for _ in document:
                            pass
                except NotText:
                    if not source.is_directory:
                        raise
                    source.skipped.append(path)
            skipped = set(source.skipped)
            source.files = [path for path in source.files if path not in skipped]
            source.size = sum(path.stat().st_size for path in source.files)

    def read(self, path: Path, progress: Bytes) -> Iterator[Iterator[list[int]]]:
        """The documents of a file, each as the ids of its pieces."""
        for document in self._documents(path, progress):
            yield self._ids(document)

    def _documents(self, path: Path, progress: Bytes) -> Iterator[Iterable[str]]:
        """Documents as blocks of text. A block is bounded, but a line of JSON is read whole."""
        if path.suffix == ".jsonl":
            for text in self._lines(path, progress):
                yield (text[start : start + self._piece] for start in range(0, len(text), self._piece))
        else:
            yield self._blocks(path, progress)

    def _blocks(self, path: Path, progress: Bytes) -> Iterator[str]:
        decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
        with _opened(path) as file:
            while True:
                block = file.read(self._piece)
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise _not_text(path, line + error.object.count(b"\n", 0, error.start), error.reason) from None
                if "\0" in text:
                    raise _not_text(path, line + text.count("\n", 0, text.index("\0")), "a NUL byte")
                if not block:
                    return
                yield text
                line += block.count(b"\n")
                progress(len(block))

    def _lines(self, path: Path, progress: Bytes) -> Iterator[str]:
        with _opened(path) as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise _not_text(path, number, error.reason) from None
                if line.strip():
                    yield self._text(f"{str(path)!r} line {number}", line)
                progress(len(raw))

    def _text(self, place: str, line: str) -> str:
        """The text of a line of JSON."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{place} is not JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise CorruptFile(f"{place} is not a JSON object but {type(value).__name__}")
        key = next((key for key in self._keys if key in value), None)
        if key is None:
            wanted, there = " or ".join(map(repr, self._keys)), ", ".join(map(repr, value)) or "nothing"
            raise CorruptFile(f"{place} has no field {wanted}; it has {there}", hint="name one with --field")
        content = value[key]
        if isinstance(content, list):
            try:
                content = self._tokenizer.render_chat(content, add_generation_prompt=False)
            except OptionError as error:
                raise CorruptFile(f"{place}: {error.message}", hint=error.hint) from None
        if not isinstance(content, str):
            what = f"{place}: {key!r} is not a text but {type(content).__name__}"
            raise CorruptFile(what, hint="valid: a string, or chat messages")
        if _SURROGATE.search(content):
            raise CorruptFile(f"{place} has half a surrogate pair, which is no character")
        return content

    def _ids(self, blocks: Iterable[str]) -> Iterator[list[int]]:
        for number, piece in enumerate(cut(blocks, self._piece)):
            yield self._encode(piece.removeprefix(" ") if number and self._drops_space else piece)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def cut(blocks: Iterable[str], size: int) -> Iterator[str]:
    """The same text in pieces of about `size` characters or more, cut where a tokenizer would cut too.

    That is before a space between two letters. A text that has none for `_LONGEST` pieces is cut at the end of a line,
    or anywhere; tokens may differ there.
    """
    held = ""
    for block in blocks:
        held += block
        if len(held) < size:
            continue
        safe = _SAFE.match(held)
        if safe is None and len(held) < _LONGEST * size:
            continue
        found = safe or _LINE_END.match(held)
        end = found.end() if found else len(held)
        yield held[:end]
        held = held[end:]
    if held:
        yield held


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _not_text(path: Path, line: int, why: str) -> NotText:
    return NotText(f"{str(path)!r} is not UTF-8 text: {why} in line {line}", hint="convert it, or leave it out")
