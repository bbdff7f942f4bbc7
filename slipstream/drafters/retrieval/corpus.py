"""A corpus on disk: texts as token ids with a suffix array, mapped into memory and searched where it lies.

A corpus is a directory. `corpus.json` says what is in it (`Header`); each shard is two files of the same length:

    tokens-00000.bin     the ids of the documents, each ended by a separator that is no token; 2 or 4 bytes, big-endian
    suffixes-00000.bin   every position in that file, sorted by the `sorted_by` tokens from there; 4, little-endian

Ids are big-endian so that slices of the file compare, as bytes, the way their tokens do: a search is a bisection over
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

from slipstream.drafters.matches import Following, Match
from slipstream.errors import CorruptFile, DraftMismatch, OptionError
from slipstream.folders import expanded
from slipstream.text import Tokenizer

FORMAT, VERSION = "slipstream corpus", 1
HEADER = "corpus.json"
SAMPLES = 64  # places of a wide match that are looked at; evenly spread, so few are enough
_REBUILD = "build it again: slipstream corpus build FILES -o DIR -m MODEL"


@dataclass(frozen=True)
class Header:
    """What `corpus.json` holds."""

    tokenizer: str  # fingerprint of the token map (`fingerprint`)
    model: str  # whose tokenizer it was, for people
    vocabulary: int  # ids are less than this
    token_bytes: int  # 2 or 4
    sorted_by: int  # tokens by which suffixes are in order: the longest match
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
        """Stands behind every document; no token has this id."""
        return (1 << 8 * self.token_bytes) - 1

    def write(self, folder: Path) -> None:
        """Write `corpus.json`."""
        (folder / HEADER).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """The header of a corpus; whatever is not one, or does not fit the files beside it, is refused."""
        path = folder / HEADER
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            what = f"has no {HEADER}" if folder.is_dir() else "is no directory"
            raise OptionError(f"no corpus: {str(folder)!r} {what}", hint="make one: slipstream corpus build") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptFile(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}", hint=_REBUILD) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CorruptFile(f"{str(path)!r} is not the header of a corpus", hint=_REBUILD)
        if content.get("version") != VERSION:
            found = f"version {content.get('version')!r} of the format"
            raise OptionError(f"{str(path)!r} is {found}, and version {VERSION} is read here", hint=_REBUILD)
        header = cls._checked(path, content)
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
            raise CorruptFile(f"{str(path)!r} has sizes that cannot be", hint=_REBUILD)
        return header


def tokens_file(shard: int) -> str:
    """The name of a shard's ids."""
    return f"tokens-{shard:05d}.bin"


def suffixes_file(shard: int) -> str:
    """The name of a shard's suffix array."""
    return f"suffixes-{shard:05d}.bin"


def fingerprint(tokenizer: Tokenizer | None, vocabulary: int) -> str:
    """What a corpus and a model must agree on: the meaning of every id; without a tokenizer, how many there are."""
    return f"size:{vocabulary}" if tokenizer is None else f"sha256:{tokenizer.fingerprint()}"


class Corpus:
    """An opened corpus. It can be read by any number of sequences, and by other processes, at once."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.header = header
        self._shards = [_Shard(folder, header, number) for number in range(len(header.shards))]

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Map the corpus in a directory. OptionError or CorruptFile if there is none that can be used."""
        folder = expanded(path)
        header = Header.read(folder)
        try:
            return cls(folder, header)
        except OSError as error:
            raise CorruptFile(f"the corpus in {str(folder)!r} cannot be read: {error.strerror}") from error

    def require_fits(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        """Refuse a corpus whose ids mean something else than the model's."""
        ours, theirs = self.header.tokenizer, fingerprint(tokenizer, vocabulary)
        if ours != theirs:
            made = f" ({self.header.model})" if self.header.model else ""
            raise DraftMismatch(
                f"corpus {str(self.folder)!r} was built with tokenizer {ours[:19]}{made}, the model has {theirs[:19]}",
                hint="build it again with -m and this model",
            )

    def match(self, tokens: Seq[int], depth: int, least: int = 1) -> Match | None:
        """The longest suffix of a text that occurs here, if it has `least` tokens, with `depth` tokens that followed.

        All shards that have it count. Of many places `SAMPLES` are looked at, evenly spread over the sorted suffixes,
        so that every continuation keeps its share.
        """
        known = _known_tail(tokens[-self.header.sorted_by :], self.header.vocabulary)
        pattern, width = np.array(known, f">u{self.header.token_bytes}").tobytes(), self.header.token_bytes
        length, holders = max(least, 1), list[_Shard]()
        for shard in self._shards:
            if here := shard.longest(pattern, length):
                length = here
                holders.append(shard)  # of a match that another shard outdoes it will have an empty span
        if not holders:
            return None
        rows = _sampled([(shard, *shard.span(pattern[-length * width :])) for shard in holders], length, depth)
        return Match(length, (rows, 0), self._following)

    def _following(self, state: tuple[list[list[int]], int]) -> Following:
        """A state: the tokens that followed the match at each place, and how many of them the path has taken."""
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
        """How many tokens at the end of `text` occur here, if `least` do; 0 if not.

        What is longer occurs less. Steps double and then halve: most matches are short, or what another shard had.
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
        """The suffixes that begin with a pattern: from one rank to another."""
        prefix = self._prefixes(len(pattern))
        first = bisect_left(self._ranks, pattern, key=prefix)
        return first, bisect_right(self._ranks, pattern, first, key=prefix)

    def _prefixes(self, size: int) -> Callable[[int], bytes]:
        """The first bytes of the suffix of a rank; they are in order."""
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
    """What stands behind the last id that the corpus cannot know (models pad their vocabulary)."""
    for index in range(len(tokens) - 1, -1, -1):
        if tokens[index] >= vocabulary:
            return tokens[index + 1 :]
    return tokens


def _sampled(spans: list[tuple[_Shard, int, int]], length: int, depth: int) -> list[list[int]]:
    """What followed at all places of these spans, or at `SAMPLES` of them."""
    total = sum(last - first for _, first, last in spans)
    chosen = np.arange(total) if total <= SAMPLES else np.arange(SAMPLES) * total // SAMPLES
    rows: list[list[int]] = []
    for shard, first, last in spans:
        inside = chosen[(chosen >= 0) & (chosen < last - first)]
        rows += shard.after(first + inside, length, depth)
        chosen = chosen - (last - first)
    return rows
