"""A corpus on disk: texts as token ids with a suffix array, memory-mapped and searched in place.

A corpus is a directory. `corpus.json` describes it (`Header`); each shard is two files of the same length:

    tokens-00000.bin     the ids of the documents, each ended by a separator that is no token; 2 or 4 bytes, big-endian
    suffixes-00000.bin   every position in that file, sorted by the `sorted_by` tokens from there; 4, little-endian

Ids are big-endian so that slices of the file compare as bytes the way their tokens do: a search is a bisection over
slices. It needs no state per sequence, and a match is never longer than `sorted_by` tokens.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from slipstream.drafters.retrieval.matches import Following, Match
from slipstream.errors import CorruptFile, DraftMismatch
from slipstream.folders import HeaderFile, expanded
from slipstream.text import Tokenizer

FORMAT, VERSION = "slipstream corpus", 1
HEADER = "corpus.json"
SAMPLES = 64  # positions of a frequent match that are read; evenly spread, so few are enough
_REBUILD = "build it again: slipstream corpus build FILES -o DIR -m MODEL"
_FILE = HeaderFile(HEADER, "corpus", FORMAT, VERSION, "slipstream corpus build", _REBUILD)


@dataclass(frozen=True)
class Header:
    """The content of `corpus.json`."""

    tokenizer: str  # fingerprint of the token map (`fingerprint`)
    model: str  # name of the tokenizer's model, for display
    vocabulary: int  # ids are less than this
    token_bytes: int  # 2 or 4
    sorted_by: int  # tokens that order the suffixes: the longest match
    shards: list[int]  # ids in each shard, separators included
    documents: int
    tokens: int  # in all documents, without separators
    made_by: str  # the package and its version
    sources: list[dict[str, Any]] = field(
        default_factory=list
    )  # what was read: path, files, skipped, documents, tokens
    format: str = FORMAT
    version: int = VERSION

    @property
    def separator(self) -> int:
        """Ends every document; no token has this id."""
        return (1 << 8 * self.token_bytes) - 1

    def write(self, folder: Path) -> None:
        """Write `corpus.json`."""
        (folder / HEADER).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """The header of a corpus; refused if invalid or if it does not fit the shard files."""
        path = folder / HEADER
        header = cls._checked(path, _FILE.read(folder))
        for shard, count in enumerate(header.shards):
            for name, width in ((tokens_file(shard), header.token_bytes), (suffixes_file(shard), 4)):
                file = folder / name
                size = file.stat().st_size if file.is_file() else 0
                if size != count * width:
                    what = f"{str(file)!r} has {size} bytes, expected {count * width}"
                    raise CorruptFile(f"the corpus is damaged: {what}", hint=_REBUILD)
        return header

    @classmethod
    def _checked(cls, path: Path, content: dict[str, Any]) -> Header:
        hints = get_type_hints(cls)
        for name in (f.name for f in fields(cls)):
            kind = get_origin(hints[name]) or hints[name]
            if type(content.get(name)) is not kind:
                raise CorruptFile(f"{str(path)!r} has no valid {name!r}", hint=_REBUILD)
        header = cls(**{f.name: content[f.name] for f in fields(cls)})
        counts = [header.vocabulary, header.sorted_by, len(header.shards), *header.shards]
        if not all(type(count) is int and count >= 1 for count in counts) or header.token_bytes not in (2, 4):
            raise CorruptFile(f"{str(path)!r} has impossible sizes", hint=_REBUILD)
        return header


def tokens_file(shard: int) -> str:
    """The file name of a shard's ids."""
    return f"tokens-{shard:05d}.bin"


def suffixes_file(shard: int) -> str:
    """The file name of a shard's suffix array."""
    return f"suffixes-{shard:05d}.bin"


def fingerprint(tokenizer: Tokenizer | None, vocabulary: int) -> str:
    """What a corpus and a model must agree on: the meaning of every id; without a tokenizer, the number of ids."""
    return f"size:{vocabulary}" if tokenizer is None else f"sha256:{tokenizer.fingerprint()}"


class Corpus:
    """An open corpus. Any number of sequences and processes can read it at once."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.header = header
        self._shards = [_Shard(folder, header, number) for number in range(len(header.shards))]

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Map the corpus in a directory. OptionError or CorruptFile if it is missing or damaged."""
        folder = expanded(path)
        header = Header.read(folder)
        try:
            return cls(folder, header)
        except OSError as error:
            raise CorruptFile(f"the corpus in {str(folder)!r} cannot be read: {error.strerror}") from error

    def require_fits(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        """Refuse a corpus built with another tokenizer."""
        ours, theirs = self.header.tokenizer, fingerprint(tokenizer, vocabulary)
        if ours != theirs:
            made = f" ({self.header.model})" if self.header.model else ""
            raise DraftMismatch(
                f"corpus {str(self.folder)!r} was built with tokenizer {ours[:19]}{made}, the model has {theirs[:19]}",
                hint="build it again with -m and this model",
            )

    def match(self, tokens: Seq[int], depth: int, least: int = 1) -> Match | None:
        """The longest suffix of a text that occurs here, if it has `least` tokens, with `depth` tokens that followed.

        All shards that have it count. Of many positions `SAMPLES` are read, evenly spread over the sorted suffixes, so
        that every continuation keeps its share.
        """
        known = _known_tail(tokens[-self.header.sorted_by :], self.header.vocabulary)
        pattern, width = np.array(known, f">u{self.header.token_bytes}").tobytes(), self.header.token_bytes
        length, holders = max(least, 1), list[_Shard]()
        for shard in self._shards:
            if here := shard.longest(pattern, length):
                length = here
                holders.append(shard)  # if another shard has a longer match, its span is empty
        if not holders:
            return None
        rows = _sampled([(shard, *shard.span(pattern[-length * width :])) for shard in holders], length, depth)
        return Match(length, (rows, 0), self._following)

    def _following(self, state: tuple[list[list[int]], int]) -> Following:
        """A state: the tokens that followed the match at each position, and how many of them the path has taken."""
        rows, taken = state
        groups: dict[int, list[list[int]]] = {}
        for row in rows:
            groups.setdefault(row[taken], []).append(row)
        groups.pop(self.header.separator, None)  # the document ended there
        return [(token, len(group), (group, taken + 1)) for token, group in groups.items()]


class _Shard:
    """One shard, mapped."""

    def __init__(self, folder: Path, header: Header, number: int) -> None:
        self._width = header.token_bytes
        self._text = _mapped(folder / tokens_file(number))
        self._tokens = np.frombuffer(self._text, f">u{self._width}")
        self._suffixes = np.frombuffer(_mapped(folder / suffixes_file(number)), "<u4")
        self._ranks = range(len(self._suffixes))

    def longest(self, text: bytes, least: int) -> int:
        """Number of tokens at the end of `text` that occur here, if at least `least`; else 0.

        Longer suffixes occur less often. Steps double and then halve: most matches are short, or as long as another
        shard's.
        """
        most = len(text) // self._width
        if most < least or not self._has(text, least):
            return 0
        length, step = least, 1
        while length + step <= most and self._has(text, length + step):
            length, step = length + step, 2 * step
        while step := step // 2:
            if length + step <= most and self._has(text, length + step):
                length += step
        return length

    def _has(self, text: bytes, length: int) -> bool:
        pattern = text[-length * self._width :]
        prefix = self._prefixes(len(pattern))
        rank = bisect_left(self._ranks, pattern, key=prefix)
        return rank < len(self._ranks) and prefix(rank) == pattern

    def span(self, pattern: bytes) -> tuple[int, int]:
        """The range of ranks of the suffixes that begin with a pattern."""
        prefix = self._prefixes(len(pattern))
        first = bisect_left(self._ranks, pattern, key=prefix)
        return first, bisect_right(self._ranks, pattern, first, key=prefix)

    def _prefixes(self, size: int) -> Callable[[int], bytes]:
        """The first bytes of the suffix of a rank; they are sorted."""
        text, position, width = self._text, self._suffixes.item, self._width
        return lambda rank: text[(start := position(rank) * width) : start + size]

    def after(self, ranks: np.ndarray[Any, np.dtype[np.int64]], length: int, depth: int) -> list[list[int]]:
        """The `depth` tokens that follow the first `length` of these suffixes."""
        starts = self._suffixes[ranks].astype(np.int64) + length
        places = starts[:, None] + np.arange(depth)
        rows: list[list[int]] = self._tokens[np.minimum(places, len(self._tokens) - 1)].tolist()  # the last one ends
        return rows


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _known_tail(tokens: Seq[int], vocabulary: int) -> Seq[int]:
    """The tokens after the last id outside the corpus's vocabulary (models pad theirs)."""
    for index in range(len(tokens) - 1, -1, -1):
        if tokens[index] >= vocabulary:
            return tokens[index + 1 :]
    return tokens


def _sampled(spans: list[tuple[_Shard, int, int]], length: int, depth: int) -> list[list[int]]:
    """What followed at all positions of these spans, or at `SAMPLES` of them."""
    total = sum(last - first for _, first, last in spans)
    chosen = np.arange(total) if total <= SAMPLES else np.arange(SAMPLES) * total // SAMPLES
    rows: list[list[int]] = []
    for shard, first, last in spans:
        inside = chosen[(chosen >= 0) & (chosen < last - first)]
        rows += shard.after(first + inside, length, depth)
        chosen = chosen - (last - first)
    return rows
