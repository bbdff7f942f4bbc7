"""What a request may ask for, and what is refused in one line that names the place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.errors import OptionError
from slipstream.grammar import Grammars
from slipstream.grammar.vocabulary import Vocabulary
from slipstream.text import Tokenizer
from tests.grammars import END, PERSON, SPECS, grammars, lettered_llm, letters, started
from tests.tiny import tiny_llm
from tests.tongues import byte_level, sentencepiece, wordpiece


def refusal(spec: dict[str, Any]) -> str:
    with pytest.raises(OptionError) as refused:
        asked = SamplingParams(structured_outputs=spec).structured_outputs
        assert asked is not None
        grammars().source(asked)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def nested(**inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": inner}, "b": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (nested(type="nope"), "json at /properties/a/items: Invalid type: nope"),
        (nested(type="string", pattern="(["), "json at /properties/a/items: regex parse error"),
        (nested(**{"$ref": "#/$defs/none"}), "json at /properties/a/items: Pointer '/$defs/none' does not exist"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "nope"}}}, "json at /$defs/x: Invalid type: nope"),
        ({"anyOf": [{"type": "null"}, {"not": {"type": "null"}}]}, 'json at /anyOf/1: Unimplemented keys: ["not"]'),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "json: Unsatisfiable schema: minLength (5)"),
        ({"$ref": "#"}, "json: there is no text that it allows"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}, "json: oneOf constraints are not"),
    ],
)
def test_a_bad_schema_is_named_with_its_place(schema: dict[str, Any], told: str) -> None:
    assert refusal({"json": schema}).startswith(f"structured_outputs: {told}")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"regex": "a(["}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: thing"}, 'unknown name: "thing"'),
        ({"grammar": "this is no grammar"}, "grammar: "),
        ({"grammar": "start: start"}, "there is no text that it allows"),
        ({"json": '{"type": '}, "json is no JSON: Expecting value"),
    ],
)
def test_bad_patterns_and_grammars_are_refused(spec: dict[str, Any], told: str) -> None:
    assert told in refusal(spec)


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


EXPLOSIVE: dict[str, dict[str, Any]] = {
    "deep": {"json": deep(900)},
    "deeper": {"json": deep(100_000)},
    "long": {"json": {"enum": ["x" * 100_000 + str(number) for number in range(11)]}},
    "combinations": {
        "json": {
            "allOf": [
                {
                    "anyOf": [
                        {"properties": {f"p{i}{j}": {"type": "string"}}, "required": [f"p{i}{j}"]} for j in range(4)
                    ]
                }
                for i in range(12)
            ]
        }
    },
    "brackets": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "nesting": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_source_that_explodes_is_stopped_by_a_limit(name: str) -> None:
    began = time.perf_counter()
    assert refusal(EXPLOSIVE[name]).startswith("structured_outputs")
    assert time.perf_counter() - began < 5.0


def test_real_shapes_compile_in_time() -> None:
    """Numbers that only look large are no danger."""
    for spec in (
        {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
        {"json": {"type": "string", "minLength": 10**6}},
        {"json": {"enum": [f"value {number}" for number in range(5000)]}},
        {"regex": "(a|b)*a(a|b){200}"},
    ):
        began = time.perf_counter()
        constraint = started(spec)
        assert constraint.forbidden([]) is not None
        assert time.perf_counter() - began < 2.0


def test_the_cache_of_grammars_is_bounded_and_shared_by_threads() -> None:
    made = Grammars(Tokenizer(letters(), eos_ids=[END]), 97, frozenset({END}))
    failed: list[Exception] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 60):
                source = made.source({"regex": f"a{{{number}}}"})
                assert made.start(source).allows([], ord("a") - 32)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(1 + 30 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(made._compiled) <= 64
    assert made.start(made.source({"regex": "a{1}"})).allows([], ord("a") - 32)  # evicted, and compiled again


def test_a_choice_is_taken_literally() -> None:
    odd = ['say "hi"', "a\\b", "line\nbreak", "tab\t", "é", "[x]*", "a|b", "{}", "$ref"]
    tokenizer = Tokenizer(byte_level(), eos_ids=[0])
    made = Grammars(tokenizer, len(tokenizer), frozenset({0}))
    for text in odd:
        constraint = started({"choice": [*odd]}, made_by=made)
        path: list[int] = []
        left = text.encode()
        while left:
            forbidden = constraint.forbidden(path)
            assert forbidden is not None
            pieces = {token: tokenizer.piece(token) for token in (~forbidden).nonzero()[0].tolist() if token}
            token = max((t for t, piece in pieces.items() if left.startswith(piece)), key=lambda t: len(pieces[t]))
            path.append(token)
            left = left[len(pieces[token]) :]
        assert constraint.allows(path, 0), text


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_forced_text_is_spelled_exactly(kind: str) -> None:
    backend = byte_level() if kind == "bytes" else sentencepiece()
    tokenizer = Tokenizer(backend, eos_ids=[0], bos_id=1 if kind == "sentencepiece" else None)
    vocabulary = Vocabulary(tokenizer, len(tokenizer), [0])
    for text in ('{"name": "', '", "age": ', "the dog", " 1234", "é", "東", "\n\n", "</s>", "<|end|>", " "):
        spelled = vocabulary(text.encode())
        assert b"".join(map(tokenizer.piece, spelled)) == text.encode()
        assert not tokenizer.special_ids.intersection(spelled)
    half = "é".encode()[:1]
    assert b"".join(map(tokenizer.piece, vocabulary(half))) == half


def test_what_a_model_lacks_is_said() -> None:
    how = SamplingParams(structured_outputs={"json_object": True}, max_tokens=3)
    with pytest.raises(OptionError, match=r"^structured_outputs need a tokenizer$"):
        tiny_llm(eos=3).generate([[1]], how)
    with pytest.raises(OptionError, match="need an end token"):
        Grammars(Tokenizer(letters()), 97, frozenset()).source({"json_object": True})
    with pytest.raises(OptionError, match="whose tokens are bytes of the text"):
        Grammars(Tokenizer(wordpiece()), 200, frozenset({0})).source({"json_object": True})


def test_without_llguidance_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["llguidance"] = None
from slipstream import SamplingParams
from slipstream.errors import OptionError
from tests.grammars import lettered_llm
llm = lettered_llm("grammar")
try:
    llm.generate([[1]], SamplingParams(structured_outputs={"json_object": True}))
except OptionError as error:
    print(error)
print(len(llm.generate([[1]], SamplingParams(max_tokens=4, seed=1))[0].token_ids))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told, count = ran.stdout.splitlines()
    assert told == "structured_outputs need llguidance (pip install 'slipstream[serve]', or llguidance itself)"
    assert count == "4"


def test_a_bad_schema_leaves_the_engine_as_it_was() -> None:
    llm = lettered_llm("grammar")
    good = SamplingParams(structured_outputs=SPECS["person"], seed=1, max_tokens=40)
    wanted = llm.generate([[1]], good)[0].token_ids
    for spec in ({"json": {"type": "nope"}}, {"regex": "("}, *EXPLOSIVE.values()):
        with pytest.raises(OptionError):
            llm.generate([[1], [2]], [good, SamplingParams(structured_outputs=spec)])
    assert llm.generate([[1]], good)[0].token_ids == wanted
    assert json.loads(str(SamplingParams(structured_outputs={"json": PERSON}).structured_outputs["json"])) == PERSON  # type: ignore[index]
