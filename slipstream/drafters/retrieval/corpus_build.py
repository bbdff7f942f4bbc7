"""Builds a corpus (format: `corpus.py`): token ids in, shards with suffix arrays out, in bounded memory.

The corpus appears atomically: shards are written to a hidden folder beside its place, the header comes last, and one
rename moves the whole. An interrupted build leaves no corpus and, unless the process is killed, no folder.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from slipstream import __version__
from slipstream.drafters.retrieval.corpus import HEADER, Header, suffixes_file, tokens_file
from slipstream.errors import OptionError
from slipstream.folders import expanded

SHARD_TOKENS = 1 << 22  # ids in a shard: sorting takes about 64 bytes for each
SORTED_BY = 32  # tokens: longer matches would predict no better

_OURS = re.compile(r"(tokens|suffixes)-\d{5,}\.bin")
_Ids: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def suffix_array(tokens: _Ids, sorted_by: int) -> _Ids:
    """The positions of `tokens` (unsigned, 2 or 4 bytes), sorted by the `sorted_by` tokens or more that begin there.

    Prefix doubling: the first key packs as many tokens as 64 bits hold; then the ranks of two neighbours are the key
    of twice as many. Equal prefixes stay in the order of the text, so the result is deterministic.
    """
    count, covered = len(tokens), 8 // tokens.dtype.itemsize
    padded = np.concatenate([tokens, np.zeros(covered, tokens.dtype)]).astype(np.uint64)
    key = np.zeros(count, np.uint64)
    for offset in range(covered):
        key = key << np.uint64(64 // covered) | padded[offset : count + offset]
    while covered < sorted_by:
        order = np.argsort(key)
        ordered = key[order]
        ranks = np.zeros(count + covered, np.uint64)  # 0: after the end
        ranks[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        key = ranks[:count] << np.uint64(32) | ranks[covered:]
        covered *= 2
    return np.argsort(key, kind="stable").astype(np.uint32)


class CorpusWriter:
    """Writes one corpus; a context manager. Without `finish`, or after an error, it leaves nothing.

    `tokenizer`: the fingerprint that a model must have to use it (`corpus.fingerprint`); `vocabulary`: number of ids;
    `model`: a name for display. `shard_tokens` bounds the memory; a longer document continues in the next shard, and no
    match crosses the boundary.
    """

    def __init__(
        self, target: str | Path, *, tokenizer: str, vocabulary: int, model: str = "", shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._target = expanded(target).resolve()
        require_free(self._target)
        self._tokenizer, self._model, self._vocabulary = tokenizer, model, vocabulary
        self._dtype = np.dtype(np.uint16 if vocabulary < 1 << 16 else np.uint32)
        self._separator = np.full(1, (1 << 8 * self._dtype.itemsize) - 1, self._dtype)
        self._shard_tokens = shard_tokens
        self._room = shard_tokens - 1  # ids that still fit in the open shard; the last one is a separator
        self._open: list[_Ids] = []
        self._in_document = False
        self._shards: list[int] = []
        self.documents = 0
        self.tokens = 0

    def __enter__(self) -> CorpusWriter:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        hidden = f".{self._target.name}.partial-"
        self._temporary = tempfile.TemporaryDirectory(prefix=hidden, dir=self._target.parent)
        self._folder = Path(self._temporary.name) / "corpus"
        self._folder.mkdir()
        return self

    def __exit__(self, *exception: object) -> None:
        self._temporary.cleanup()

    def add(self, ids: Iterable[int]) -> None:
        """Append tokens to the open document; the first ones open it."""
        given = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        if not len(given):
            return
        if given.min() < 0 or given.max() >= self._vocabulary:
            wrong = given[(given < 0) | (given >= self._vocabulary)][0]
            raise OptionError(f"there is no token {wrong}", hint=f"valid: 0 to {self._vocabulary - 1}")
        self.tokens += len(given)
        self._in_document = True
        while len(given) > self._room:
            self._open.append(given[: self._room].astype(self._dtype))
            given = given[self._room :]
            self._close_shard()
        self._open.append(given.astype(self._dtype))
        self._room -= len(given)

    def end_document(self) -> None:
        """The next tokens belong to another document. One without tokens does not count."""
        if self._in_document:
            self._in_document = False
            self.documents += 1
            self._open.append(self._separator)
            self._room -= 1
            if self._room < 1:
                self._close_shard()

    def _close_shard(self) -> None:
        """Sort and write the shard. Every shard ends in a separator, so that no match runs over its end."""
        ids = np.concatenate(self._open)
        if ids[-1] != self._separator[0]:
            ids = np.concatenate([ids, self._separator])
        shard = len(self._shards)
        ids.astype(self._dtype.newbyteorder(">")).tofile(self._folder / tokens_file(shard))
        suffix_array(ids, SORTED_BY).astype("<u4").tofile(self._folder / suffixes_file(shard))
        self._shards.append(len(ids))
        self._open, self._room = [], self._shard_tokens - 1

    def finish(self, sources: list[dict[str, Any]] | None = None) -> Header:
        """Move the corpus to its place, replacing an older one. `sources`: what was read, for display."""
        self.end_document()
        if sum(map(len, self._open)):
            self._close_shard()
        if not self._shards:
            raise OptionError("there is nothing to build a corpus from: no text was found")
        header = Header(
            tokenizer=self._tokenizer,
            model=self._model,
            vocabulary=self._vocabulary,
            token_bytes=self._dtype.itemsize,
            sorted_by=SORTED_BY,
            shards=self._shards,
            documents=self.documents,
            tokens=self.tokens,
            made_by=f"slipstream {__version__}",
            sources=sources or [],
        )
        header.write(self._folder)
        require_free(self._target)  # the build may have taken hours
        old = Path(self._temporary.name) / "old"
        if self._target.exists():
            self._target.rename(old)
        try:
            self._folder.rename(self._target)
        except OSError:
            if old.exists():
                old.rename(self._target)
            raise
        return header


def require_free(target: Path) -> None:
    """Refuse to write over anything but an empty directory or a corpus without other files."""
    if not target.exists():
        return
    if not target.is_dir():
        raise OptionError(f"{str(target)!r} is a file", hint="a corpus is a directory: give another name")
    names = {entry.name for entry in target.iterdir()}
    others = sorted(name for name in names - {HEADER} if not _OURS.fullmatch(name))
    if names and (others or HEADER not in names):
        found = f"it has {others[0]!r}" if others else f"it has no {HEADER}"
        raise OptionError(f"{str(target)!r} is not a corpus and is left alone: {found}", hint="give another directory")
