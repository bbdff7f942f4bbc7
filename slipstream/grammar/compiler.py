"""From what a request asks for to a constraint: sources, compiling, limits, and a cache of compiled grammars."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from slipstream.errors import OptionError
from slipstream.grammar.constraint import Constraint
from slipstream.grammar.place import bad_place
from slipstream.grammar.vocabulary import load_vocabulary
from slipstream.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # compiled grammars
_LONGEST = 1 << 20  # characters of a source: compiling takes about a second for each million
# Written as Python's json.dumps does. No other white space is allowed: a model could write it without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles grammars for one model. Any thread may compile; the engine's thread starts sequences."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._gate = threading.Lock()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise OptionError("structured_outputs need a tokenizer")
        if not self._end_ids:
            raise OptionError("structured_outputs need an end token, and this model has none")
        return load_vocabulary(self._tokenizer, self._vocab_size, self._end_ids)

    def source(self, asked: Mapping[str, object]) -> str:
        """The grammar of checked `structured_outputs` as llguidance writes it, compiled to see that it is sound."""
        ((kind, value),) = asked.items()
        if len(str(value)) > _LONGEST:
            raise OptionError(
                f"structured_outputs: {kind} has {len(str(value))} characters", hint=f"at most {_LONGEST}"
            )
        assert self._vocabulary is not None  # llguidance is there
        text = _source(kind, value)
        try:
            self._start(text)
        except _Unsound as error:
            raise OptionError(f"structured_outputs: {kind}{self._place(kind, value, str(error))}: {error}") from None
        return text

    def start(self, source: str) -> Constraint:
        """The constraint of a sequence that has no output yet."""
        return Constraint(self._start(source).deep_copy(), [], self._end_ids, self._vocab_size)

    def _start(self, source: str) -> LLMatcher:
        """The matcher of a compiled grammar in its initial state. It never consumes anything: sequences use copies."""
        with self._gate:
            if (known := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return known
        matcher = self._compile(source)
        with self._gate:
            self._compiled[source] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        # The defaults stop grammars that explode; a step of such a one may take 20 ms.
        limits = LLParserLimits(step_lexer_fuel=100_000, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():  # the first step finds grammars that match no text, and most that explode
            matcher.compute_ff_tokens()
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _Unsound(_one_line(matcher.get_error()))
        return matcher

    def _place(self, kind: str, value: object, message: str) -> str:
        """Where in a schema the error is; regular expressions and grammars have it in the message."""
        if kind != "json":
            return ""

        def error_of(part: dict[str, object]) -> str:
            try:
                self._compile(_source("json", json.dumps(part)))
            except (_Unsound, OptionError) as error:
                return str(error)
            return ""

        return bad_place(json.loads(str(value)), message, error_of)


class _Unsound(Exception):
    """A grammar that cannot be compiled: llguidance's message."""


def _source(kind: str, value: object) -> str:
    from llguidance import LLMatcher, grammar_from

    if kind == "choice":
        return grammar_from("choice", json.dumps(value))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(str(value))
    try:
        if kind == "grammar":
            return grammar_from("grammar", str(value))
        schema = '{"type": "object"}' if kind == "json_object" else str(value)
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE)  # type: ignore[arg-type]
    except ValueError as error:
        raise OptionError(f"structured_outputs: {kind}: {_one_line(str(error))}") from None


def _one_line(message: str) -> str:
    """An error message of llguidance in one line, without its source excerpts and its context."""
    if message.startswith("NoExtension"):
        return "there is no text that it allows"
    lines = [line.strip() for line in message.strip().splitlines()]
    reason = " ".join(line for line in lines if line.strip("^ ") and not re.match(r"\d+ \|", line))
    return reason.partition(" while processing")[0][:300]
