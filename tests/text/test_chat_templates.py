"""Chat templates: the dialect of transformers, where a template comes from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CorruptFile, OptionError
from slipstream.text import Tokenizer
from tests.vocabularies import CHATS, save_directory, train_byte_level


def with_template(template: Any, tmp_path: Path, **config: Any) -> Tokenizer:
    return Tokenizer.from_directory(save_directory(train_byte_level(), tmp_path, chat_template=template, **config))


RICH = """{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools, please') }}{% endif -%}
{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- generation %}{% set body = m.content | trim %}<{{ m.role }}>{{ body }}{{ eos_token }}{% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{{ {'html': '<b>&"é"'} | tojson }}{{ [1, {'a': none}] | tojson(indent=2) }}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{{ strftime_now('%Y') | length }}{{ mood | default('calm') }}{{ tools is none }}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize("chat", [*CHATS, [{"role": "skip", "content": "x"}, *CHATS[2], *CHATS[1]]])
def test_template_dialect_equals_transformers(tmp_path: Path, chat: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    ours, theirs = with_template(RICH, tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    for options in ({}, {"mood": "glad"}, {"add_generation_prompt": True}):
        expected = theirs.apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": False, **options})
        assert ours.render_chat(chat, **{"add_generation_prompt": False, **options}) == expected


def test_template_sources(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    assert with_template(named, tmp_path).render_chat(CHATS[0]) == "default"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "from jinja"


def test_no_template(tmp_path: Path) -> None:
    ours = with_template(None, tmp_path)
    assert not ours.has_chat_template
    with pytest.raises(OptionError, match="generate"):
        ours.encode_chat(CHATS[0])


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ("Hi", "list"),
        ({"role": "user", "content": "Hi"}, "list"),
        (None, "list"),
        ([], "empty"),
        (["Hi"], r"messages\[0\]"),
        ([{"content": "Hi"}], "role"),
        ([{"role": "user"}], "content"),
        ([CHATS[0][0], {"role": "user", "content": 3}], r"messages\[1\].*int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text"),
        ([{"role": "tool", "content": "Hi"}], "no tools, please"),
    ],
)
def test_bad_messages(tmp_path: Path, messages: Any, word: str) -> None:
    with pytest.raises(OptionError, match=word) as caught:
        with_template(RICH, tmp_path).render_chat(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.__class__.__mro__ }}", "{{ messages[0].x.y }}"])
def test_templates_that_fail(tmp_path: Path, template: str) -> None:
    with pytest.raises(OptionError, match="chat template"):
        with_template(template, tmp_path).render_chat(CHATS[0])


def test_a_template_that_does_not_parse(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="chat template"):
        with_template("{% for %}", tmp_path).render_chat(CHATS[0])


def test_text_parts_are_joined(byte_level: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert byte_level.render_chat(parts) == byte_level.render_chat([{"role": "user", "content": "a\nb"}])
