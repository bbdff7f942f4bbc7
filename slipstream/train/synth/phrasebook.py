"""The patterns and words of requests, read from the texts in `phrases/`.

A file has three kinds of sections, each below a line of its own:

    = KIND WEIGHT    requests of a kind, one a line; WEIGHT is how likely the kind is
    + NAME           texts for a slot, one a line, which have slots themselves
    : NAME           words and phrases for a slot, split by semicolons, over as many lines as they take

In a pattern `{animal}` is an entry of that list, `{animal2}` another one, `{word}` one of the target's own words,
`{3-20}` a number, and `{Write|Create}` one of these; slots may be nested. `\\n` is a line break, and `<<` and `>>` are
literal braces. Lines that begin with `#` are comments.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_FOLDER, _ENDING = "phrases", ".txt"


@dataclass(frozen=True)
class Phrasebook:
    """Kinds of requests with their patterns and weights, texts with slots, and words."""

    patterns: dict[str, tuple[str, ...]]
    weights: dict[str, int]
    parts: dict[str, tuple[str, ...]]
    words: dict[str, tuple[str, ...]]
    digest: str  # of all lines: another phrasebook makes other requests


@cache
def phrasebook() -> Phrasebook:
    """The phrasebook of the package."""
    folder = files("slipstream.train.synth") / _FOLDER
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(_ENDING)}
    return read(line for name in sorted(texts) for line in texts[name].splitlines())


def read(lines: Iterable[str]) -> Phrasebook:
    """The sections of one or more files. A repeated section adds to the first."""
    patterns: dict[str, list[str]] = defaultdict(list)
    weights: dict[str, int] = {}
    parts: dict[str, list[str]] = defaultdict(list)
    words: dict[str, list[str]] = defaultdict(list)
    section: list[str] | None = None
    digest = hashlib.sha256()
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        digest.update(line.encode() + b"\n")
        sign, _, name = line.partition(" ")
        if sign == "=":
            name, _, weight = name.rpartition(" ")
            if not weight.isdigit() or weights.setdefault(name, int(weight)) != int(weight):
                raise ValueError(f"a kind has one weight, after its name: {line!r}")
            section = patterns[name]
        elif sign == "+":
            section = parts[name]
        elif sign == ":":
            section = words[name]
        elif section is None:
            raise ValueError(f"a line before the first section: {line!r}")
        else:
            section.append(line)
    if both := parts.keys() & words.keys():
        raise ValueError(f"texts and words of the same name: {', '.join(sorted(both))}")
    return Phrasebook(
        {name: _unfolded(lines) for name, lines in patterns.items()},
        weights,
        {name: _unfolded(lines) for name, lines in parts.items()},
        {name: _entries(lines) for name, lines in words.items()},
        digest.hexdigest(),
    )


def _unfolded(lines: list[str]) -> tuple[str, ...]:
    return tuple(line.replace("\\n", "\n") for line in lines)


def _entries(lines: list[str]) -> tuple[str, ...]:
    return tuple(entry for part in " ".join(lines).split(";") if (entry := part.strip()))
