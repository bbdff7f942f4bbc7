"""What cannot be honoured is refused, by name, in OpenAI's shape, with the status where it belongs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving import Served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]


def refused(server: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a refusal."""
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"Messages": 1}, "Messages"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}, "str": 1}}, "tool_choice.str"),
        ({"stream_options": {"nonsense": 1}, "stream": True}, "stream_options.nonsense"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),  # beside another max_tokens
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1001}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template": "{{ 7 }}"}, "chat_template"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        ({"prediction": {"type": "content", "content": "a", "nonsense": 1}}, None),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"speculate": "eagle3"}, "speculate"),
        ({"speculate": "bogus"}, "speculate"),
        ({"speculate": {"method": "ngram", "nonsense": 1}}, "speculate"),
        ({"speculate": {"method": "auto", "clock": 3}}, "speculate"),
        ({"speculate": {"nonsense": 1}}, "speculate"),
        ({"speculate": {"method": 3}}, "speculate"),
        ({"speculate": ""}, "speculate"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "chat_template_kwargs"),
    ],
)
def test_a_chat_that_cannot_be_honoured(server: Served, body: dict[str, Any], param: str | None) -> None:
    error = refused(server, CHAT, {"messages": HI, "max_tokens": 3, **body})
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param and param.split(".")[-1] in error["message"]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"items": {"type": "nope"}}}}, "json at /properties/a/items: "),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, "json at /anyOf/1: "),
        ({"enum": ["x" * 100_000 + str(number) for number in range(11)]}, "json has 11"),
    ],
)
def test_a_bad_schema_is_refused_with_its_place(server: Served, schema: dict[str, Any], place: str) -> None:
    """Or with its size, if it would explode. The server goes on."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refused(server, CHAT, {"messages": HI, "max_tokens": 3, "response_format": form})
    assert place in error["message"] and error["param"] == "response_format"
    assert server.post(CHAT, {"messages": HI, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": "a", "messages": HI}, "messages"),
        ({"prompt": "a", "prediction": [100000]}, "prediction"),
        ({"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
    ],
)
def test_a_completion_that_cannot_be_honoured(server: Served, body: dict[str, Any], param: str) -> None:
    assert refused(server, COMPLETIONS, body)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"reasoning": {"summary": "detailed"}}, "summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 1001}, "top_logprobs"),
        ({"input": [{"role": "nobody"}]}, "input"),
        ({"input": [{"role": 3, "content": "Hi"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}}, "text"),
        ({"n": 2}, "n"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"speculate": {"method": "ngram", "nonsense": 1}}, "speculate"),
    ],
)
def test_a_response_that_cannot_be_honoured(server: Served, body: dict[str, Any], param: str) -> None:
    error = refused(server, RESPONSES, {"input": "Hi", **body})
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": HI, "temperature": "0.5"}, "temperature"),
        (CHAT, {"messages": HI, "stream": 1}, "stream"),
        (CHAT, {"messages": HI, "n": True}, "n"),
        (CHAT, {"messages": HI, "stop": 3}, "stop"),
        (CHAT, {"messages": HI, "speculate": 3}, "speculate"),
        (CHAT, {"messages": HI, "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"messages": HI, "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        (CHAT, {"messages": HI, "prediction": {"type": "content", "content": 3}}, "prediction.content"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "a"}}, "prediction"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        (CHAT, [], None),
        (CHAT, None, None),
    ],
)
def test_a_body_that_does_not_fit_its_schema_is_422(server: Served, path: str, body: Any, param: str | None) -> None:
    assert refused(server, path, body, 422)["param"] == param


def test_what_is_not_json(server: Served) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"NaN", b'{"messages": ' + b"[" * 5000):
        response = server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (400, 422), (content[:20], response.text)
    nan = server.http.post(
        CHAT,
        content=json.dumps({"messages": HI, "temperature": float("nan")}),
        headers={"content-type": "application/json"},
    )
    assert nan.status_code == 400 and nan.json()["error"]["param"] == "temperature"
    assert server.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_a_prompt_that_is_too_long(server: Served) -> None:
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": "word " * 600}]})
    assert error["code"] == "context_length_exceeded" and "context holds 512" in error["message"]


def test_what_is_not_there(server: Served) -> None:
    assert refused(server, CHAT, {"messages": HI, "model": "gpt-5"}, 404)["code"] == "model_not_found"
    assert refused(server, "/v1/nonsense", {}, 404)["type"] == "not_found_error"
    assert server.http.get("/v1/models/nonsense").status_code == 404
    assert server.http.get(CHAT).status_code == 405


def test_what_asks_for_nothing_is_taken(server: Served) -> None:
    inert: dict[str, Any] = {
        "user": "me", "safety_identifier": "me", "prompt_cache_key": "k", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "modalities": ["text"], "best_of": 1, "use_beam_search": False, "length_penalty": 1.0,
        "temperature": None, "stop": None, "logprobs": None, "tools": None, "n": None, "stream": None,
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "stream_options": None,
    }  # fmt: skip
    assert server.answer(CHAT, {"messages": HI, "max_tokens": 2, **inert})["choices"]


def test_nothing_of_it_is_left(server: Served) -> None:
    server.until_idle()
