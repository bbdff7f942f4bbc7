"""Prompts of the bench: the shipped workload, and every format of a user's file."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.encoding import Encoder
from slipstream.bench.prompts import BenchPrompt, categories, read_file, workload
from slipstream.errors import PromptError, SlipstreamError
from slipstream.text import Tokenizer

KINDS = {
    "code", "structured", "edit", "summary", "translation", "chat", "reasoning", "story", "qa", "multi_turn", "tools",
}  # fmt: skip


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_workload_has_sixteen_prompts_of_each_kind() -> None:
    prompts = workload()
    assert set(categories(prompts)) == KINDS
    assert min(Counter(prompt.category for prompt in prompts).values()) >= 16
    assert len({str(prompt.messages) for prompt in prompts}) == len({prompt.name for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.messages[-1]["role"] in ("user", "tool"), prompt.name
        assert bool(prompt.tools) == (prompt.category == "tools")
        roles = [message["role"] for message in prompt.messages if message["role"] in ("user", "assistant")]
        assert all(a != b for a, b in itertools.pairwise(roles)), f"{prompt.name}: roles alternate"
        assert (roles.count("user") > 1) == (prompt.category == "multi_turn"), prompt.name


FORMATS: list[tuple[Any, dict[str, Any]]] = [
    ("Why?", {"messages": (user("Why?"),), "category": "mine"}),
    ({"text": "Why?", "category": "c"}, {"messages": (user("Why?"),), "category": "c"}),
    ({"prompt": "Why?", "output_tokens": 9}, {"messages": (user("Why?"),), "sampling": {"max_tokens": 9}}),
    ({"task_id": "X/1", "prompt": "def f():", "test": ""}, {"name": "X/1", "category": "code"}),
    ({"question_id": 81, "category": "writing", "turns": ["a", "b"]},
     {"name": "81", "category": "writing", "messages": (user("a"),), "turns": ("b",)}),
    ({"messages": [user("a")], "temperature": 0.5, "model": "m", "stream": True},
     {"messages": (user("a"),), "sampling": {"temperature": 0.5}}),
    ({"custom_id": "r1", "url": "/v1/chat/completions", "body": {"messages": [user("a")], "max_completion_tokens": 5}},
     {"name": "r1", "sampling": {"max_tokens": 5}}),
    ({"model": "m", "prompt": "Once", "stop": ["."]}, {"text": "Once", "messages": (), "sampling": {"stop": ["."]}}),
    ({"messages": [user("a")], "tools": [{"type": "function"}], "response_format": {"type": "json_object"}},
     {"tools": ({"type": "function"},), "wire": {"response_format": {"type": "json_object"}}}),
    ({"prompt": "Why?", "output_tokens": -1}, {"messages": (user("Why?"),), "sampling": {}}),
    ({"prompt": [5, 6, 7], "max_tokens": 4}, {"ids": (5, 6, 7), "messages": (), "sampling": {"max_tokens": 4}}),
    ({"messages": [user("a")], "reasoning_effort": "low"}, {"variables": {"reasoning_effort": "low"}}),
    ({"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": False}},
     {"variables": {"enable_thinking": False}}),
    ({"model": "m", "input": "Why?", "max_output_tokens": 9, "store": False, "instructions": "Short."},
     {"messages": ({"role": "system", "content": "Short."}, user("Why?")), "sampling": {"max_tokens": 9}}),
    ({"body": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
               "reasoning": {"effort": "high"}, "text": {"format": {"type": "json_object"}}}},
     {"messages": (user("a"),), "variables": {"reasoning_effort": "high"},
      "wire": {"reasoning_effort": "high", "response_format": {"type": "json_object"}}}),
    ({"input": [user("a"), {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "3"}],
      "tools": [{"type": "function", "name": "f", "parameters": {}}]},
     {"tools": ({"type": "function", "function": {"name": "f", "parameters": {}}},),
      "messages": (user("a"), {"role": "assistant", "content": "", "tool_calls": [
          {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
          {"role": "tool", "tool_call_id": "1", "content": "3"})}),
    ({"instruction": "Add", "input": "1 + 1"}, {"messages": (user("Add\n\n1 + 1"),)}),
    ({"prompt": "a", "input": None}, {"messages": (user("a"),)}),  # a table with an empty column
    ({"question": "a", "input": "a remark"}, {"messages": (user("a"),)}),
    ({"text": "a", "input": "a remark"}, {"messages": (user("a"),)}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), FORMATS, ids=[json.dumps(line)[:40] for line, _ in FORMATS])
def test_formats_are_recognised_by_their_keys(tmp_path: Path, line: Any, expected: dict[str, Any]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (prompt,) = read_file(file)
    assert {name: getattr(prompt, name) for name in expected} == expected


def test_a_list_of_prompts_is_as_many_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": [[1, 2], [3]], "id": "a"}\n{"prompt": ["One", "Two"], "id": "b", "max_tokens": 3}\n')
    found = read_file(file)
    assert [(p.name, p.ids, p.text) for p in found] == [
        ("a/0", (1, 2), ""), ("a/1", (3,), ""), ("b/0", (), "One"), ("b/1", (), "Two"),
    ]  # fmt: skip
    assert [p.body() for p in found[1:3]] == [{"prompt": [3]}, {"prompt": "One", "max_tokens": 3}]


def test_token_ids_are_sent_to_the_model_as_they_are(byte_level: Tokenizer) -> None:
    encoder = Encoder(byte_level)
    assert encoder.encode(BenchPrompt("a", "a", ids=(1, 2, 3))) == [1, 2, 3]
    with pytest.raises(PromptError, match="token 99999 is not one of the model's"):
        encoder.encode(BenchPrompt("a", "a", ids=(1, 99999)))


def test_variables_of_the_template_are_used_or_refused(byte_level: Tokenizer) -> None:
    prompt = BenchPrompt("a", "a", (user("Hi"),), wire={"reasoning_effort": "low"})
    template = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
    knows = Tokenizer(byte_level._backend, chat_template=template)
    assert knows.decode(Encoder(knows).encode(prompt)) == "lowHi"
    for refused in (Tokenizer(byte_level._backend, chat_template=template[23:]), Tokenizer(byte_level._backend)):
        with pytest.raises(PromptError, match=r"a: .*chat template"):
            Encoder(refused).encode(prompt)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text('Say "no".\n\n  Why?\n')
    first, second = read_file(file)
    assert (first.messages, second.name) == ((user('Say "no".'),), "mine/3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON: "),
        ("[1]", "line 2: neither a text nor an object"),
        ('{"answer": 1}', "line 2: the line has no prompt"),
        ('{"messages": []}', "line 2: messages is empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: the last message is the assistant's"),
        ('{"messages": [{"role": "user", "content": "x"}], "temprature": 1}', "line 2: unknown field 'temprature'"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "line 2: temperature=-1 is out of"),
        ('{"messages": [{"role": "user", "content": "x"}], "n": 2}', "line 2: n: one answer"),
        ('{"messages": [{"role": "user", "content": "x"}], "logprobs": true}', "line 2: logprobs"),
        ('{"prompt": "x", "category": 3}', "line 2: category=3 is not a name"),
        ('{"prompt": "x", "output_tokens": 0}', "line 2: max_tokens=0"),
        ('{"body": 3}', "line 2: body is not an object"),
        ('{"prompt": []}', "line 2: the prompt is empty"),
        ('{"prompt": [1, -2]}', "line 2: prompt is neither text nor token ids"),
        ('{"prompt": [[1], [true]]}', "line 2: prompt is neither text nor token ids"),
        ('{"prompt": [1], "reasoning_effort": "low"}', "line 2: reasoning_effort: a plain prompt has no chat template"),
        ('{"messages": [{"role": "user", "content": "a"}], "input": "b"}', "line 2: unknown field 'input'"),
        ('{"input": 3}', "line 2: input is neither a text nor a list"),
        ('{"input": "x", "reasoning": {"summary": "detailed"}}', "line 2: reasoning.summary is not known"),
        ('{"input": "x", "previous_response_id": "r"}', "line 2: unknown field 'previous_response_id'"),
        ('{"input": [{"type": "item_reference", "id": "x"}]}', "line 2: input[0]: items of type 'item_reference'"),
        ('{"input": [{"role": "user", "content": [{"type": "input_image"}]}]}', "line 2: input[0] has a part that is"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(SlipstreamError) as refused:
        read_file(file)
    assert str(refused.value).startswith(f"{str(file)!r} {message}")


def test_tools_are_told_in_words_where_a_template_has_no_place_for_them(byte_level: Tokenizer) -> None:
    prompt = next(p for p in workload() if p.category == "tools" and len(p.messages) == 3)
    plain = Tokenizer(byte_level._backend, chat_template="{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    encoder = Encoder(plain)
    text = plain.decode(encoder.encode(prompt))
    assert encoder.tools_as_text
    for tool in prompt.tools:
        assert tool["function"]["description"] in text
    assert '"name": "order_status", "arguments": {"order_id": "A-20981"}' in text


@pytest.mark.parametrize("length", [400, 2000])
def test_a_context_is_filled_to_its_length(byte_level: Tokenizer, length: int) -> None:
    encoder = Encoder(byte_level)
    for prompt in (BenchPrompt("a", "a", (user("Why is the sky blue?"),)), BenchPrompt("a", "a", text="Once upon")):
        assert abs(len(encoder.encode(prompt, context=length)) - length) <= 40
    assert byte_level.decode(encoder.encode(prompt, context=length)).endswith("Once upon")


def test_a_later_turn_follows_the_answers(byte_level: Tokenizer) -> None:
    prompt = BenchPrompt("a", "a", (user("One?"),), turns=("Two?", "Three?"))
    text = byte_level.decode(Encoder(byte_level).encode(prompt, ["1.", "2."]), skip_special=False)
    places = [text.index(part) for part in ("One?", "1.", "Two?", "2.", "Three?")]
    assert places == sorted(places)
