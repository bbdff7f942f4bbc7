"""The patterns and words that requests are made of, read from the texts in `phrases/`.

A file has three kinds of sections, each below a line of its own:

    = KIND WEIGHT    requests of a kind, one a line; WEIGHT is how likely the kind is
    + NAME           texts for a slot, one a line, which have slots themselves
    : NAME           words and phrases for a slot, split by semicolons, over as many lines as they take

In a pattern `{animal}` is an entry of that list, `{animal2}` another one, `{word}` one of the target's own words,
`{3-20}` a number, and `{Write|Create}` one of these; slots may stand inside each other. `\\n` begins a new line, and
`<<` and `>>` are braces of a program. Lines that begin with `#` are comments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_FOLDER = "phrases"


@dataclass(frozen=True)
class Phrasebook:
    """What was read: kinds of requests with their patterns and weights, texts with slots, and words."""

    patterns: dict[str, tuple[str, ...]]
    weights: dict[str, int]
    parts: dict[str, tuple[str, ...]]
    words: dict[str, tuple[str, ...]]


@cache
def phrasebook() -> Phrasebook:
    """The one that comes with the package."""
    folder = files("slipstream.train") / _FOLDER
    texts = sorted((file.name, file.read_text(encoding="utf-8")) for file in folder.iterdir())
    return read(line for _, text in texts for line in text.splitlines())


def read(lines: Iterable[str]) -> Phrasebook:
    """The sections of one or several files. A section that comes again adds to what is there."""
    patterns: dict[str, list[str]] = defaultdict(list)
    weights: dict[str, int] = {}
    parts: dict[str, list[str]] = defaultdict(list)
    words: dict[str, list[str]] = defaultdict(list)
    section: list[str] = []
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        sign, _, name = line.partition(" ")
        if sign == "=":
            name, _, weight = name.rpartition(" ")
            section, weights[name] = patterns[name], int(weight)
        elif sign == "+":
            section = parts[name]
        elif sign == ":":
            section = words[name]
        else:
            section.append(line)
    listed = {name: " ".join(lines).split(";") for name, lines in words.items()}
    return Phrasebook(
        {name: _unfolded(lines) for name, lines in patterns.items()},
        weights,
        {name: _unfolded(lines) for name, lines in parts.items()},
        {name: tuple(entry.strip() for entry in entries) for name, entries in listed.items()},
    )


def _unfolded(lines: list[str]) -> tuple[str, ...]:
    return tuple(line.replace("\\n", "\n") for line in lines)
