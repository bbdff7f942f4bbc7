"""Incremental detokenization."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

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
        """A copy that continues from the same place."""
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
