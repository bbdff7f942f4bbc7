"""Keys of conversations: the same beginning has the same keys, and a table forgets what a cache has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.server.ray.prefixes import PrefixTable, longest, prefixes_of, unpacked


def keys(body: Any) -> list[int]:
    return [prefix.key for prefix in prefixes_of(json.dumps(body).encode())]


def said(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **more}


def test_a_conversation_that_goes_on_has_the_keys_of_its_beginning() -> None:
    first, second = keys(said("Hi")), keys(said("Hi", "Hello!", "How are you?"))
    assert len(first) == 1 and len(second) == 3 and second[:1] == first
    assert keys(said("Ho", "Hello!", "How are you?"))[2] != second[2], "a key depends on all before it"
    assert keys(said("Hi", temperature=1, stream=True)) == first, "only on what the model reads"
    assert keys(said("Hi", tools=[{"type": "function"}]))[0] != first[0], "which tools are"


def test_a_long_text_has_keys_within() -> None:
    long = "all the same " * 100
    one, other = keys({"prompt": long + "but this"}), keys({"prompt": long + "and that"})
    assert len(one) > 4 and one[:-1] == other[:-1] and one[-1] != other[-1]
    ids = list(range(1000))
    assert keys({"prompt": ids})[:-1] == keys({"prompt": [*ids, 7]})[: len(keys({"prompt": ids})) - 1]
    brief = {"instructions": "Be brief."}
    assert keys({"input": "Hi", **brief})[0] == keys({"input": "Ho", **brief})[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b'{"messages": 3}', b'{"messages": []}', b"\xff"])
def test_what_is_no_conversation_has_keys_or_none_but_no_error(body: bytes) -> None:
    assert len(prefixes_of(body)) <= 1


def test_a_table_forgets_what_was_used_least_and_the_end_of_a_conversation_first() -> None:
    whole = prefixes_of(json.dumps(said("a" * 1000)).encode())
    other = prefixes_of(json.dumps(said("b" * 1000)).encode())
    table = PrefixTable(1500)
    table.add(whole)
    table.add(other)
    held = unpacked(table.packed(100))
    assert longest(other, held) == other[-1].length
    assert 0 < longest(whole, held) < whole[-1].length
    assert longest(whole, unpacked(table.packed(len(other)))) == 0, "those that were used last are published"
    table.add(whole)
    assert longest(whole, unpacked(table.packed(100))) == whole[-1].length
    assert longest(other, unpacked(table.packed(100))) < other[-1].length
    table.clear()
    assert table.packed(100) == b""
    table.add(whole)
    assert longest(whole, unpacked(table.packed(100))) == whole[-1].length
