"""Grammars begin where the reasoning part ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.grammar import Grammars
from slipstream.server.parsing.after_reasoning import after_reasoning
from slipstream.server.parsing.reasoning import REASONING_STYLES
from slipstream.text import Tokenizer
from slipstream.tree import TokenTree
from tests.invoking import save_model
from tests.serving import served
from tests.vocabularies import TEMPLATE

QWEN, MISTRAL = REASONING_STYLES["qwen3"], REASONING_STYLES["mistral"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
OPEN, CLOSED, BARE = "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", "assistant\n"


@pytest.fixture(scope="module")
def grammars(tiny: str) -> tuple[Grammars, Tokenizer]:
    tokenizer = Tokenizer.from_directory(tiny)
    return Grammars(tokenizer, 320, frozenset(tokenizer.eos_ids)), tokenizer


def accepts(grammars: tuple[Grammars, Tokenizer], wanted: dict[str, Any], text: str) -> bool:
    made, tokenizer = grammars
    matcher = made._start(made.source(wanted)).deep_copy()
    ids = tokenizer.encode(text, add_special=False)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": SCHEMA}, '{"a": true}', "yes"),
        ({"json": json.dumps(SCHEMA)}, '{"a": false}', '{"a": 1}'),
        ({"json_object": True}, '{"b": [1]}', "[1]"),
        ({"choice": ["yes", 'a "no"']}, 'a "no"', "maybe"),
        ({"regex": r"a/b\/\d+"}, "a/b/12", "a-b/12"),
        ({"grammar": 'start: word "!"\nword: /[a-z]+/'}, "hey!", "hey"),
    ],
)
def test_every_kind(grammars: tuple[Grammars, Tokenizer], wanted: dict[str, Any], good: str, bad: str) -> None:
    inside = after_reasoning(wanted, QWEN, OPEN, {})
    assert accepts(grammars, inside, f"so {bad} it </thin is\n</think>\n\n{good}")
    assert not accepts(grammars, inside, good), "the part must be closed first"
    assert not accepts(grammars, inside, f"so</think>{bad}")
    free = after_reasoning(wanted, QWEN, BARE, {})
    assert accepts(grammars, free, good) and accepts(grammars, free, f"<think>hm</think>\n{good}")
    assert not accepts(grammars, free, f"hm</think>\n{good}") and not accepts(grammars, free, bad)
    assert after_reasoning(wanted, QWEN, CLOSED, {}) == wanted == after_reasoning(wanted, None, OPEN, {})


def test_the_part_ends_inside_a_draft(grammars: tuple[Grammars, Tokenizer]) -> None:
    """The draft goes on as far as it is in the schema, and the matcher stays where the output is."""
    made, tokenizer = grammars
    inside = made.start(made.source(after_reasoning({"json": SCHEMA}, QWEN, OPEN, {})))
    thought, whole, astray = (
        tokenizer.encode(text, add_special=False)
        for text in ("hm, so", 'hm, so</think>\n{"a": true}', 'hm, so</think>\n{"b": 1}')
    )
    tree = TokenTree.chain(0, whole)
    assert inside.pruned(tree) is tree
    same = next(place for place, (one, other) in enumerate(zip(whole, astray, strict=False)) if one != other)
    assert inside.pruned(TokenTree.chain(0, astray)).tokens[1:] == whole[:same]
    assert same > len(thought) and inside.allows(thought, whole[-1]), "what it thinks is free still"


def test_tags_that_are_special_tokens(grammars: tuple[Grammars, Tokenizer]) -> None:
    """They are matched by their ids: no text spells them."""
    tokenizer = grammars[1]
    special = {"[THINK]": tokenizer.encode("<|endoftext|>")[0], "[/THINK]": tokenizer.encode("<|im_start|>")[0]}
    made = after_reasoning({"choice": ["yes"]}, MISTRAL, BARE, special)
    assert accepts(grammars, made, "<|endoftext|>hm<|im_start|>yes") and accepts(grammars, made, "yes")
    assert not accepts(grammars, made, "<|endoftext|>hm yes")


def test_on_the_wire(tmp_path: Path) -> None:
    """The prompt opens the part; its end is likely enough to come soon; then the schema holds."""
    template = TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}{# </think> #}")
    folder = save_model(tmp_path / "thinks", template=template, extra="</think>")
    written = json.loads((folder / "tokenizer.json").read_text())
    (end,) = [token for token in written["added_tokens"] if token["content"] == "</think>"]
    end["special"] = False  # as in the models that have it
    (folder / "tokenizer.json").write_text(json.dumps(written))
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form, "max_tokens": 200, "seed": 1}
    body["logit_bias"] = {str(end["id"]): 3}
    with served(str(folder), speculate="grammar+suffix") as server:
        (choice,) = server.answer("/v1/chat/completions", body)["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "stop" and json.loads(message["content"]).keys() == {"a"}
        assert message["reasoning_content"]
        chunks = [chunk["choices"][0]["delta"] for chunk in server.events("/v1/chat/completions", body)[:-1]]
        for part in ("content", "reasoning_content"):
            assert "".join(delta.get(part, "") for delta in chunks) == message[part]
        plain = server.answer("/v1/chat/completions", {**body, "speculate": False})
        assert plain["choices"][0]["message"] == message
