"""Whole requests as people make them: patterns whose slots are filled with words.

A small model alone writes few requests that a person would make, and a drafter drafts badly on topics missing from its
training data. So most first turns are made here, and the target only answers them. `phrasebook.py` defines patterns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from slipstream.text import Tokenizer
from slipstream.train.synth.phrasebook import phrasebook

KINDS = tuple(phrasebook().patterns)  # a request's kind is stored as its index here
_ENOUGH = 100  # words of a target's own; with fewer our own list is used
_LED, _ENDED = 0.25, 0.3  # shares of requests with a lead-in, and with a wish for the form of the answer
_SLOT = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)-(\d+)")
_WHOLE = re.compile(r" [a-z]{5,}")


def own_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The words that are single tokens of the target, including some prefixes of words: they cover its topics. None if
    tokens do not show that they follow a space.
    """
    texts = (tokenizer.token_text(id) for id in range(len(tokenizer)))
    return tuple(text[1:] for text in texts if _WHOLE.fullmatch(text))


class Requests:
    """Makes requests. `own`: the target's own words, for `{word}`, if there are enough."""

    def __init__(self, own: Sequence[str]) -> None:
        self._book = book = phrasebook()
        self._weights = [book.weights[kind] for kind in KINDS]
        self._words = {**book.words, "word": own} if len(own) >= _ENOUGH else book.words

    def make(self, draw: random.Random) -> tuple[int, str]:
        """The index of a kind in `KINDS`, and a request of that kind; all its patterns are equally likely."""
        kind = draw.choices(range(len(KINDS)), self._weights)[0]
        pattern = draw.choice(self._book.patterns[KINDS[kind]])
        text = self._filled(pattern, draw).replace("<<", "{").replace(">>", "}").strip()
        if not pattern[0].islower():  # some people write so, without a lead-in
            text = text[0].upper() + text[1:]
            if draw.random() < _LED:
                text = self._filled("{lead}", draw) + " " + text
        if draw.random() < _ENDED:
            # After a given text, a program or half a sentence it goes on its own line.
            text += (" " if pattern.endswith((".", "?", "!")) else "\n\n") + draw.choice(self._words["ending"])
        return kind, text

    def _filled(self, pattern: str, draw: random.Random, used: set[str] | None = None) -> str:
        """A pattern with a choice for every slot, from the inside out. A repeated name gets the same choice, and no
        text is repeated while there are others; `used`: those already in the request.
        """
        used = set() if used is None else used
        taken: dict[str, str] = {}
        while found := _SLOT.search(pattern):
            pattern = pattern[: found.start()] + self._choice(found[1], taken, used, draw) + pattern[found.end() :]
        return pattern

    def _choice(self, slot: str, taken: dict[str, str], used: set[str], draw: random.Random) -> str:
        if "|" in slot:
            return draw.choice(slot.split("|"))
        if span := _RANGE.fullmatch(slot):
            return str(draw.randint(int(span[1]), int(span[2])))
        if texts := self._book.parts.get(slot):
            text = draw.choice([text for text in texts if text not in used] or texts)
            used.add(text)
            return self._filled(text, draw, used)
        while slot not in taken:
            word = draw.choice(self._words[slot.removesuffix("2")])
            if word not in taken.values():
                taken[slot] = word
        return taken[slot]
