"""Tiny models that can be held to a grammar, grammars of every kind, and what their texts must be."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from slipstream import LLM
from slipstream.grammar import Constraint, Grammars
from slipstream.text import Tokenizer
from tests.tiny import tiny_directory, tiny_draft
from tests.tongues import directory

END = 96  # the token that ends an answer of the tiny models

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "cow", "dog"]},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
LISTS: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "null"}, {"type": "number"}, {"$ref": "#/$defs/pair"}]},
    "minItems": 1,
    "maxItems": 3,
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/pair"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
}
SPECS: dict[str, dict[str, Any]] = {
    "person": {"json": PERSON},
    "lists": {"json": LISTS},
    "object": {"json_object": True},
    "regex": {"regex": r"[a-c]{1,4}@[x-z]+\.(com|org)"},
    "choice": {"choice": ["yes", "yes, of course", "no", 'a "b" \\ c']},
    "calculator": {"grammar": 'start: sum\nsum: NUM | sum ("+" | "-") NUM\nNUM: /[0-9]{1,3}/\n'},
    "endless": {"regex": r"[a-z ]*"},
}


def complete(spec: dict[str, Any], text: str) -> bool:
    """Whether a whole text is one of those that the grammar describes, by another implementation."""
    ((kind, value),) = spec.items()
    if kind == "choice":
        return text in value
    if kind in ("regex", "grammar"):
        pattern = value if kind == "regex" else r"[0-9]{1,3}([+-][0-9]{1,3})*"
        return re.fullmatch(pattern, text) is not None
    schema = {"type": "object"} if kind == "json_object" else value
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


def letters() -> tokenizers.Tokenizer:
    """One token per printable ASCII character, spelled as bytes, and two special ones: the ids of `tests/tiny.py`."""
    vocabulary = {chr(32 + i): i for i in range(1, 95)} | {"Ġ": 0, "<a>": 95, "<b>": 96}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="Ġ"))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("", "isolated"), bytes_of])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<a>", "<b>"])
    return backend


@functools.cache
def lettered_directory(context: int = 300) -> Path:
    """The tiny model with characters, whose answers end."""
    return directory(tiny_directory(0, context=context, eos=END), letters(), eos_token="<b>")


def lettered_llm(speculate: Any = None, verifier: str = "match", **options: Any) -> LLM:
    return LLM(lettered_directory(), speculate=tiny_draft(speculate), verifier=verifier, **options)


@functools.cache
def grammars() -> Grammars:
    return Grammars(Tokenizer.from_directory(lettered_directory()), 97, frozenset({END}))


def started(spec: dict[str, Any], output: list[int] | None = None, made_by: Grammars | None = None) -> Constraint:
    """The constraint of a sequence with this output."""
    from slipstream import SamplingParams

    made_by = made_by or grammars()
    asked = SamplingParams(structured_outputs=spec).structured_outputs
    assert asked is not None
    return made_by.start(made_by.source(asked)).following(output if output is not None else [])
