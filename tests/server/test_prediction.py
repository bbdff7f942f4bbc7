"""`prediction` on every route: the same text, drafted from the prediction, and billed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import Served, served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "The quick brown fox"}]
HOW: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**HOW, "messages": ASK, "max_tokens": 60},
    COMPLETIONS: {**HOW, "prompt": "The quick brown fox", "max_tokens": 60},
    RESPONSES: {**HOW, "input": ASK, "max_output_tokens": 60},
}
WRONG = "def add(a, b): " * 10


@pytest.fixture(scope="module")
def predicting(tiny: str) -> Iterator[Served]:
    with served(tiny, speculate="prediction") as running:
        yield running


def spelled(path: str, text: str) -> Any:
    return text if path == COMPLETIONS else {"type": "content", "content": text}


def said(path: str, answer: dict[str, Any]) -> tuple[str, int, int]:
    """The text, and how many tokens of the prediction were accepted and rejected; none without a prediction."""
    usage = answer["usage"]
    details = usage["output_tokens_details"] if path == RESPONSES else usage.get("completion_tokens_details", {})
    counts = details.get("accepted_prediction_tokens", -1), details.get("rejected_prediction_tokens", -1)
    if path == RESPONSES:
        return answer["output"][0]["content"][0]["text"], *counts
    (choice,) = answer["choices"]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"], *counts


def last_usage(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage at the end of a stream."""
    if path == RESPONSES:
        usage = server.events(path, body)[-1]["response"]["usage"]
    else:
        usage = server.events(path, {**body, "stream_options": {"include_usage": True}})[-2]["usage"]
    found: dict[str, Any] = usage
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_right_and_a_wrong_prediction(predicting: Served, path: str) -> None:
    text, *none = said(path, predicting.answer(path, BODIES[path]))
    assert none == [-1, -1]
    for predicted, right in ((text, True), (WRONG, False)):
        body = {**BODIES[path], "prediction": spelled(path, predicted)}
        answer = predicting.answer(path, body)
        same, accepted, rejected = said(path, answer)
        assert same == text
        counted = answer["metrics"]["speculative_decoding"]
        assert accepted == counted["num_accepted_draft_tokens"] and (accepted > 30) == right
        assert accepted + rejected == counted["num_draft_nodes"] > 0 and (right or rejected > 0)
        assert last_usage(predicting, path, body) == answer["usage"]


def test_a_prediction_in_token_ids_and_for_several_prompts(predicting: Served) -> None:
    body = {**BODIES[COMPLETIONS], "prompt": ["The quick brown fox", "a b c"], "return_token_ids": True}
    plain = predicting.answer(COMPLETIONS, body)
    assert "completion_tokens_details" not in plain["usage"]
    told = predicting.answer(COMPLETIONS, {**body, "prediction": plain["choices"][0]["token_ids"]})
    assert told["choices"] == plain["choices"]
    assert told["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 30


def test_a_prediction_in_parts(predicting: Served) -> None:
    text, *_ = said(CHAT, predicting.answer(CHAT, BODIES[CHAT]))
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for path in (CHAT, RESPONSES):
        found = predicting.answer(path, {**BODIES[path], "prediction": {"type": "content", "content": parts}})
        assert said(path, found)[0] == text and said(path, found)[1] > 30
