"""Tools on the wire: calls that the model chooses to make, one call at most, strict functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_refusals import refused
from tests.server.tooling import WEATHER, saying, served_with_tools, written_call
from tests.serving import Served

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OSLO, ROME = {"city": "Oslo", "days": 1}, {"city": "Rome", "days": 2}
FIRST, SECOND = written_call(OSLO), written_call(ROME)
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "auto",
    "max_tokens": 300,
    "seed": 1,
}
ITEMS: dict[str, Any] = {
    "input": "Hi", "tools": [{"type": "function", **WEATHER}], "tool_choice": "auto", "max_output_tokens": 300,
}  # fmt: skip


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, int]]:
    with served_with_tools(tmp_path_factory.mktemp("tools")) as running:
        yield running


@pytest.fixture(scope="module")
def server(talking: tuple[Served, int]) -> Served:
    return talking[0]


Said = tuple[str, list[tuple[str, Any]], str | None]  # content, calls, finish_reason


def whole(server: Served, body: dict[str, Any]) -> Said:
    (choice,) = server.answer(CHAT, body)["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return choice["message"]["content"] or "", named, choice["finish_reason"]


def streamed(server: Served, body: dict[str, Any]) -> Said:
    *chunks, done = server.events(CHAT, body)
    assert done == "[DONE]"
    content, calls, reason = "", [], None
    for (choice,) in (chunk["choices"] for chunk in chunks):
        assert reason is None, "nothing follows the end"
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function"
                calls.append((part["function"]["name"], ""))
            name, arguments = calls[part["index"]]
            calls[part["index"]] = name, arguments + part["function"]["arguments"]
        reason = choice["finish_reason"]
    return content, [(name, json.loads(arguments)) for name, arguments in calls], reason


@pytest.mark.parametrize("said", [whole, streamed])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (FIRST, "", [OSLO]),
        (f"Let me see.\n{FIRST}", "Let me see.", [OSLO]),
        (f"{FIRST}\n{SECOND}", "", [OSLO, ROME]),
        ("No need.", "No need.", []),
    ],
)
def test_calls_that_the_model_chooses_to_make(
    server: Served, said: Any, text: str, content: str, calls: list[Any]
) -> None:
    found = said(server, {**ASK, **saying(text)})
    assert found == (content, [("weather", one) for one in calls], "tool_calls" if calls else "stop")


@pytest.mark.parametrize("said", [whole, streamed])
@pytest.mark.parametrize("text", [f"{FIRST}\n{SECOND}", f"{FIRST}\nand\n{SECOND} so", f"{FIRST} {FIRST[11:]}"])
def test_one_call_where_only_one_is_allowed(server: Served, said: Any, text: str) -> None:
    """What the model writes after it is neither a call nor content, and does not matter: not even its length."""
    body = {**ASK, **saying(text), "parallel_tool_calls": False}
    assert said(server, body) == ("", [("weather", OSLO)], "tool_calls")
    tokens = server.answer(CHAT, body)["usage"]["completion_tokens"]
    assert said(server, {**body, "max_tokens": tokens - 5}) == ("", [("weather", OSLO)], "tool_calls")


@pytest.mark.parametrize("several", [True, False])
def test_a_call_that_is_cut_is_not_complete(server: Served, several: bool) -> None:
    body = {**ASK, **saying(FIRST), "parallel_tool_calls": several}
    tokens = server.answer(CHAT, body)["usage"]["completion_tokens"]
    (choice,) = server.answer(CHAT, {**body, "max_tokens": tokens - 16})["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and call["function"]["name"] == "weather"
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("strict", [True, False])
def test_strict_functions_that_the_model_chooses_to_call(talking: tuple[Served, int], strict: bool) -> None:
    """A model that wants nothing but the marker writes a call after it, and an answer without a marker is free."""
    server, marker = talking
    tools = [{"type": "function", "function": {**WEATHER, "strict": strict}}]
    body = {**ASK, "tools": tools, "parallel_tool_calls": False, "logit_bias": {str(marker): 100}, "max_tokens": 100}
    for found in (whole(server, body), streamed(server, body), whole(server, {**body, "speculate": False})):
        content, calls, reason = found
        if not strict:
            assert (calls, reason) == ([], "length") and set(content.split("<tool_call>")) == {""}
            continue
        ((name, arguments),) = calls
        assert (content, name, reason) == ("", "weather", "tool_calls")
        assert arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9
    free = {**body, "logit_bias": {str(marker): -100}, "max_tokens": 20}
    assert whole(server, free)[1:] == ([], "length")


def test_strict_functions_beside_another_form_are_refused(server: Served) -> None:
    strict = {**WEATHER, "strict": True}
    tools = [{"type": "function", "function": strict}]
    error = refused(server, CHAT, {**ASK, "tools": tools, "response_format": {"type": "json_object"}})
    assert error["param"] == "tools" and "strict" in error["message"]
    items = {**ITEMS, "tools": [{"type": "function", **strict}], "text": {"format": {"type": "json_object"}}}
    assert refused(server, RESPONSES, items)["param"] == "tools"


# -- the same as items and events --------------------------------------------------------------------------------------


def test_function_calls_of_a_response_are_told_as_they_come(server: Served) -> None:
    body = {**ITEMS, **saying(f"Let me see.\n{FIRST}\n{SECOND}")}
    answer = server.answer(RESPONSES, body)
    events = server.named_events(RESPONSES, body)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    last = events[-1][1]["response"]
    assert events[-1][0] == "response.completed" and last["status"] == answer["status"] == "completed"
    message, *calls = last["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert [call["type"] for call in calls] == ["function_call"] * 2
    assert [json.loads(call["arguments"]) for call in calls] == [OSLO, ROME]
    for mine, other in zip(last["output"], answer["output"], strict=True):
        assert {**mine, "id": 0, "call_id": 0} == {**other, "id": 0, "call_id": 0}
    for place, call in enumerate(calls, 1):
        told = [(name, data) for name, data in events if data.get("output_index") == place]
        (added, first), *deltas, (done, sent), (ended, item) = told
        assert (added, ended) == ("response.output_item.added", "response.output_item.done")
        assert first["item"] == {**call, "arguments": "", "status": "in_progress"} and item["item"] == call
        assert {name for name, _ in deltas} == {"response.function_call_arguments.delta"}
        assert {data["item_id"] for _, data in [*deltas, (done, sent)]} == {call["id"]}
        assert "".join(data["delta"] for _, data in deltas) == call["arguments"] == sent["arguments"]
        assert done == "response.function_call_arguments.done" and sent["name"] == "weather"


def test_one_call_of_a_response(server: Served) -> None:
    body = {**ITEMS, **saying(f"{FIRST}\n{SECOND} so"), "parallel_tool_calls": False}
    length = server.answer(RESPONSES, body)["usage"]["output_tokens"]
    for limits in ({}, {"max_output_tokens": length - 5}):
        answer = server.answer(RESPONSES, {**body, **limits})
        last = server.named_events(RESPONSES, {**body, **limits})[-1][1]["response"]
        for told in (answer, last):
            (item,) = told["output"]
            assert item["type"] == "function_call" and json.loads(item["arguments"]) == OSLO
            assert told["status"] == "completed" and told["incomplete_details"] is None
