"""`/v1/responses`: the same answers as a chat, told in items and events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.tooling import served_with_thoughts
from tests.serving import Served

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
HOW = {"temperature": 0.8, "seed": 3}


def chat_text(server: Served, messages: list[dict[str, Any]], tokens: int = 30) -> str:
    text: str = server.answer(CHAT, {"messages": messages, "max_tokens": tokens, **HOW})["choices"][0]["message"][
        "content"
    ]
    return text


def test_a_whole_response(server: Served) -> None:
    text = chat_text(server, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}])
    body = {"input": "Hi there", "instructions": "Be kind.", "max_output_tokens": 30, "metadata": {"a": "b"}, **HOW}
    answer = server.answer(PATH, body)
    (item,) = answer["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 30 and answer["metadata"] == {"a": "b"} and answer["store"] is False
    assert answer["metrics"]["speculative_decoding"]["num_steps"] > 0


def test_the_items_of_a_conversation_are_its_messages(server: Served) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello\nyou"},
        {"role": "user", "content": "And?"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Hello", "annotations": []}, {"type": "output_text", "text": "you"}]},
        {"type": "message", "role": "user", "content": "And?"},
    ]  # fmt: skip
    answer = server.answer(PATH, {"input": items, "max_output_tokens": 30, **HOW})
    assert answer["output"][0]["content"][0]["text"] == chat_text(server, messages)


def test_calls_and_their_results_become_messages() -> None:
    from slipstream.server.items import messages_of
    from slipstream.server.wire.responses import ResponsesBody

    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "warm"}]},
    ]
    user, turn, cold, warm = messages_of(ResponsesBody(input=items))
    assert user == {"role": "user", "content": "Weather?"}
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"] and turn["reasoning_content"] == "hm"
    assert turn["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert cold == {"role": "tool", "tool_call_id": "c1", "content": "cold"} and warm["content"] == "warm"


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def joined(events: list[tuple[str | None, Any]], kind: str) -> str:
    return "".join(data["delta"] for name, data in events if name == f"response.{kind}.delta")


def test_json_by_a_schema_streamed(server: Served) -> None:
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    for seed in range(3):
        body = {"input": "Hi", "max_output_tokens": 100, "seed": seed, "text": {"format": form}}
        events = server.named_events(PATH, body)
        text = joined(events, "output_text")
        assert json.loads(text).keys() == {"a"}
        last = events[-1][1]["response"]
        assert events[-1][0] == "response.completed" and last["text"]["format"] == form
        answer = server.answer(PATH, body)
        assert text == last["output"][0]["content"][0]["text"] == answer["output"][0]["content"][0]["text"]


def test_any_json_object(server: Served) -> None:
    (closing,) = server.answer("/tokenize", {"prompt": "}"})["tokens"]
    bias = {"logit_bias": {str(closing): 100}, "max_output_tokens": 20}
    answer = server.answer(PATH, {"input": "Hi", **bias, "text": {"format": {"type": "json_object"}}})
    assert answer["output"][0]["content"][0]["text"] == "{}" and answer["status"] == "completed"


def test_reasoning_items_and_their_events(tmp_path: Path) -> None:
    with served_with_thoughts(tmp_path / "thinks") as (server, end):
        form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
        body = {"input": "Hi", "text": {"format": form}, "max_output_tokens": 200, "seed": 1}
        body |= {"logit_bias": {str(end): 3}}
        answer, events = server.answer(PATH, body), server.named_events(PATH, body)
        text = server.answer(PATH, {**body, "reasoning": None})["output"][1]["content"][0]["text"]
    thought, message = answer["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message") and thought["summary"] == []
    (part,) = thought["content"]
    assert part["type"] == "reasoning_text" and part["text"] and "</think>" not in part["text"]
    assert json.loads(message["content"][0]["text"]).keys() == {"a"} and message["content"][0]["text"] == text
    details = answer["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["output_tokens"]
    assert joined(events, "reasoning_text") == part["text"] and joined(events, "output_text") == text
    kinds = [name for name, data in events if data.get("output_index") == 0]
    assert kinds[:2] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[-3:] == [
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert set(kinds[2:-3]) == {"response.reasoning_text.delta"}
    ids = {data["item_id"] for _, data in events if "item_id" in data and data["output_index"] == 0}
    last = events[-1][1]["response"]
    assert ids == {last["output"][0]["id"]} and last["output"][0]["content"] == [part]


def test_the_events_of_a_stream(server: Served) -> None:
    body = {"input": "Hi there", "max_output_tokens": 30, "top_logprobs": 1, **HOW}
    events = server.named_events(PATH, body)
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    kinds = [name for name, _ in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    last = events[-1][1]["response"]
    assert text == chat_text(server, [{"role": "user", "content": "Hi there"}])
    assert last["output"][0]["content"][0]["text"] == text == events[-4][1]["text"]
    assert len(last["output"][0]["content"][0]["logprobs"]) == last["usage"]["output_tokens"] == 30
    assert events[0][1]["response"]["output"] == [] and events[0][1]["response"]["status"] == "in_progress"
