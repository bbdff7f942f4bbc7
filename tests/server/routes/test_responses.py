"""`/v1/responses`: the same answers as a chat, told in items and events."""

from __future__ import annotations

from typing import Any

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
