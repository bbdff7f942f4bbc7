"""Incremental detokenization, and stop strings."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from slipstream.errors import OptionError
from slipstream.text.pieces import Style
from slipstream.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_WINDOW = 8  # tokens: enough for two split characters
_BROKEN = "\ufffd"


class IncrementalDecoder:
    """The text of an answer, as far as its tokens determine it.

    All that `push` and `flush` return, concatenated, is the answer's text after the prompt: a first token that begins
    with a space keeps it, unless the prompt has no text. A character split over tokens comes with the token that
    completes it (also if the prompt has its first bytes). Each token costs the same, however long the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        latest_first = (id for id in reversed(prompt_ids) if id not in self._hidden)
        stream = _WindowStream if tokenizer.decoding.style is Style.OTHER else _ByteStream
        self._stream: _WindowStream | _ByteStream = stream(tokenizer, latest_first)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        return self._stream.push([id for id in ids if id not in self._hidden])

    def flush(self) -> str:
        """The rest at the end of the answer: U+FFFD for an incomplete character, or nothing."""
        return self._stream.flush()

    def copy(self) -> IncrementalDecoder:
        """Another that goes on from here."""
        other = copy.copy(self)
        other._stream = self._stream.copy()
        return other


class _ByteStream:
    """For vocabularies whose tokens are bytes: the codec holds back incomplete characters."""

    def __init__(self, tokenizer: Tokenizer, prompt_latest_first: Iterator[int]) -> None:
        self._tokenizer = tokenizer
        self._codec = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in prompt_latest_first:
            tail = tokenizer.piece(id) + tail
            if len(tail) >= _LONGEST_CHARACTER:  # UTF-8 is self-synchronising: no more is needed
                break
        self._codec.decode(tail)
        self._strip = tokenizer.decoding.strips_space and not tail  # until the first text

    def push(self, ids: list[int]) -> str:
        return self._stripped(self._codec.decode(b"".join(map(self._tokenizer.piece, ids))))

    def flush(self) -> str:
        return self._stripped(self._codec.decode(b"", final=True))

    def copy(self) -> _ByteStream:
        other = copy.copy(self)
        other._codec = codecs.getincrementaldecoder("utf-8")("replace")
        other._codec.setstate(self._codec.getstate())
        return other

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """For any other decoder: decodes the new tokens together with a few before them, and returns the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt_latest_first: Iterator[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(islice(prompt_latest_first, _WINDOW))[::-1]  # tokens whose text has been returned
        self._fresh: list[int] = []  # tokens whose text has not
        self._returned = len(self._decode(self._context).rstrip(_BROKEN))  # characters of the context's text

    def push(self, ids: list[int]) -> str:
        return "".join(map(self._push, ids))

    def _push(self, id: int) -> str:
        self._fresh.append(id)
        text = self._decode(self._context + self._fresh)[self._returned :]
        # A decoder that spells single bytes shows U+FFFD until the character is complete; one that is still there after
        # that many tokens is intended.
        if (not text or text.endswith(_BROKEN)) and len(self._fresh) < _LONGEST_CHARACTER:
            return ""
        self._context, self._fresh = (self._context + self._fresh)[-_WINDOW:], []
        self._returned = len(self._decode(self._context))
        return text

    def flush(self) -> str:
        text = self._decode(self._context + self._fresh)[self._returned :]
        self._returned += len(text)
        return text

    def copy(self) -> _WindowStream:
        other = copy.copy(self)
        other._context, other._fresh = list(self._context), list(self._fresh)
        return other

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


class StopStrings:
    """Finds the first stop string in a text that arrives in parts, and holds back what may become one.

    The match that is complete first wins; of several complete at the same character, the longest. So the result does
    not depend on how the text was split, and the `push` that completes a match returns it. `shown`: whether the match
    itself is part of the text.
    """

    def __init__(self, stops: Iterable[str], *, shown: bool = False) -> None:
        self._shown = shown
        self._stops = tuple(dict.fromkeys(stops))
        if not all(isinstance(stop, str) and stop for stop in self._stops):
            raise OptionError("a stop string is empty or not a string", hint="give strings of one character or more")
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that is now complete or None).

        A match is final: what follows is never shown, and further pushes return the match again.
        """
        if self._found is not None or not self._stops:
            return ("", self._found) if self._found is not None else (text, None)
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [stop for index, stop in enumerate(self._stops) if self._advance(index, character)]
            if complete:
                self._found, self._held = max(complete, key=len), ""
                return seen[: end if self._shown else end - len(self._found)], self._found
        cut = len(seen) - max(self._matched)
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text that was held back, at the end; the search starts anew."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def copy(self) -> StopStrings:
        """Another that goes on from here."""
        other = copy.copy(self)
        other._matched = list(self._matched)
        return other

    def _advance(self, index: int, character: str) -> bool:
        """One Knuth-Morris-Pratt step: whether this character completes the stop string."""
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        self._matched[index] = matched
        return matched == len(stop)


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != character:
            length = borders[length - 1]
        borders.append(length + (pattern[length] == character))
    return borders
