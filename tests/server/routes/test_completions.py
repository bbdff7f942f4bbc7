"""`/v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.serving import Served

PATH = "/v1/completions"
TEXTS = ["The quick brown fox", "def add(a, b):", "The quick"]
HOW = SamplingParams(max_tokens=30, temperature=0.7, seed=11)
BODY: dict[str, Any] = {"max_tokens": 30, "temperature": 0.7, "seed": 11}


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, speculate=None)


def streamed(events: list[Any]) -> dict[int, str]:
    assert events[-1] == "[DONE]"
    texts: dict[int, str] = {}
    for choice in (choice for chunk in events[:-1] for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_a_text_ids_and_lists_of_both(server: Served, llm: LLM) -> None:
    outputs = llm.generate(TEXTS, HOW)
    wanted = [output.text for output in outputs]
    ids = [output.prompt_token_ids for output in outputs]
    for prompt, texts in ((TEXTS[0], wanted[:1]), (ids[0], wanted[:1]), (TEXTS, wanted), (ids, wanted)):
        answer = server.answer(PATH, {**BODY, "prompt": prompt})
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        assert answer["usage"]["completion_tokens"] == 30 * len(texts)
        assert streamed(server.events(PATH, {**BODY, "prompt": prompt})) == dict(enumerate(texts))


def test_several_choices_of_several_prompts(server: Served, llm: LLM) -> None:
    how = SamplingParams(max_tokens=30, temperature=0.7, seed=11, n=2)
    wanted = [one.text for output in llm.generate(TEXTS, how) for one in output.outputs]
    body = {**BODY, "prompt": TEXTS, "n": 2}
    assert [choice["text"] for choice in server.answer(PATH, body)["choices"]] == wanted
    events = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert streamed(events) == dict(enumerate(wanted))
    assert events[-2]["usage"]["completion_tokens"] == 180 and events[-2]["choices"] == []


def test_sixteen_tokens_by_default(server: Served) -> None:
    answer = server.answer(PATH, {"prompt": "The quick", "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16


def test_log_probabilities_with_offsets(server: Served, llm: LLM) -> None:
    (output,) = llm.generate([TEXTS[0]], SamplingParams(max_tokens=30, temperature=0.7, seed=11, logprobs=2))
    body = {**BODY, "prompt": TEXTS[0], "logprobs": 2}
    told = server.answer(PATH, body)["choices"][0]["logprobs"]
    assert output.logprobs is not None
    known = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert told["token_logprobs"] == pytest.approx(known) and len(told["tokens"]) == 30
    assert all(len(top) <= 2 for top in told["top_logprobs"])
    assert told["text_offset"][0] == 0 and told["text_offset"][1] == len(told["tokens"][0])
    parts = [chunk["choices"][0]["logprobs"] for chunk in server.events(PATH, body)[:-1]]
    assert [value for part in parts for value in part["token_logprobs"]] == told["token_logprobs"]


def test_echo_gives_the_prompt_and_its_log_probabilities(server: Served, llm: LLM) -> None:
    (output,) = llm.generate([TEXTS[0]], SamplingParams(max_tokens=5, temperature=0.0, logprobs=1, prompt_logprobs=1))
    body = {"prompt": TEXTS[0], "max_tokens": 5, "temperature": 0, "echo": True}
    assert server.answer(PATH, body)["choices"][0]["text"] == TEXTS[0] + output.text
    assert streamed(server.events(PATH, body)) == {0: TEXTS[0] + output.text}
    told = server.answer(PATH, {**body, "logprobs": 1})["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(output.prompt_token_ids) + 5 and told["token_logprobs"][0] is None
    assert output.prompt_logprobs is not None
    for value, token, entry in zip(
        told["token_logprobs"][1:], output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=False
    ):
        assert entry is not None and value == pytest.approx(entry[token].logprob)
    scored = server.answer(PATH, {**body, "logprobs": 1, "max_tokens": 0})["choices"][0]
    assert scored["text"] == TEXTS[0] and len(scored["logprobs"]["tokens"]) == len(output.prompt_token_ids)
    ids = server.answer(PATH, {**body, "prompt": output.prompt_token_ids})
    assert ids["choices"][0]["text"] == TEXTS[0] + output.text


def test_prompt_log_probabilities_are_of_the_choice(server: Served) -> None:
    answer = server.answer(PATH, {**BODY, "prompt": TEXTS, "prompt_logprobs": 0, "return_token_ids": True})
    for choice in answer["choices"]:
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
        assert len(choice["token_ids"]) == 30


def test_priorities_are_taken(server: Served) -> None:
    assert server.answer(PATH, {**BODY, "prompt": "The", "priority": -3})["choices"]


def test_tokens_and_back(server: Served, llm: LLM) -> None:
    text = "The quick 東京"
    answer = server.answer("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == llm.get_tokenizer().encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512 and len(answer["token_strs"]) == answer["count"]
    assert server.answer("/detokenize", {"tokens": answer["tokens"]})["prompt"] == text
    messages = [{"role": "user", "content": "Hi"}]
    told = server.answer("/tokenize", {"messages": messages})["tokens"]
    assert told == llm.get_tokenizer().encode_chat(messages)
