"""`/v1/chat/completions`: whole and streamed answers are those of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.types import Output
from tests.serving import Served

PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "The quick brown fox. The quick brown"}]
BODY: dict[str, Any] = {"messages": ASK, "max_tokens": 40, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, speculate=None)


def wanted(llm: LLM, messages: Any = ASK, **how: Any) -> Output:
    return llm.chat(messages, SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": 3, **how}))[0]


def streamed(events: list[Any]) -> dict[int, str]:
    """The text of each choice."""
    assert events[-1] == "[DONE]"
    texts: dict[int, str] = {}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


def test_a_whole_answer_is_the_engines(server: Served, llm: LLM) -> None:
    answer, output = server.answer(PATH, BODY), wanted(llm)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.text, "refusal": None, "annotations": []}
    assert choice["finish_reason"] == output.finish_reason == "length"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids) and usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40


def test_a_stream_has_the_same_text_then_the_usage_then_done(server: Served, llm: LLM) -> None:
    events = server.events(PATH, {**BODY, "stream_options": {"include_usage": True}})
    assert streamed(events) == {0: wanted(llm).text}
    *chunks, last, _ = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 40
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}


def test_without_stream_options_no_chunk_has_a_usage(server: Served) -> None:
    assert all("usage" not in chunk for chunk in server.events(PATH, BODY)[:-1])


def test_the_usage_so_far_in_every_chunk(server: Served) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, _, _ = server.events(PATH, {**BODY, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 40 and counts[0] >= 1


def test_several_choices(server: Served, llm: LLM) -> None:
    output = wanted(llm, n=3)
    texts = {one.index: one.text for one in output.outputs}
    assert len(set(texts.values())) == 3
    answer = server.answer(PATH, {**BODY, "n": 3})
    assert {choice["index"]: choice["message"]["content"] for choice in answer["choices"]} == texts
    assert answer["usage"]["completion_tokens"] == 120
    events = server.events(PATH, {**BODY, "n": 3, "stream_options": {"include_usage": True}})
    assert streamed(events) == texts and events[-2]["usage"]["completion_tokens"] == 120


def test_any_drafter_or_none_gives_the_same_text(server: Served, llm: LLM) -> None:
    text = wanted(llm).text
    for speculate in (True, False, "ngram", "suffix", {"method": "ngram"}):
        assert server.answer(PATH, {**BODY, "speculate": speculate})["choices"][0]["message"]["content"] == text
    plain = server.answer(PATH, {**BODY, "speculate": False})["metrics"]["speculative_decoding"]
    assert plain["num_draft_tokens"] == 0 and plain["mean_acceptance_length"] == 1.0


def test_log_probabilities(server: Served, llm: LLM) -> None:
    output = wanted(llm, logprobs=3)
    assert output.logprobs is not None
    answer = server.answer(PATH, {**BODY, "logprobs": True, "top_logprobs": 3})
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 40
    for entry, token, logprobs in zip(entries, output.token_ids, output.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(logprobs[token].logprob)
        assert bytes(entry["bytes"]) == llm.get_tokenizer().piece(token)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
    bare = server.answer(PATH, {**BODY, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in bare] == [entry["logprob"] for entry in entries]
    assert all(entry["top_logprobs"] == [] for entry in bare)
    chunks = server.events(PATH, {**BODY, "logprobs": True, "top_logprobs": 3})[:-1]
    parts = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert parts == entries


def test_prompt_log_probabilities_and_token_ids(server: Served, llm: LLM) -> None:
    output = wanted(llm, prompt_logprobs=2)
    answer = server.answer(PATH, {**BODY, "prompt_logprobs": 2, "return_token_ids": True})
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == output.token_ids
    assert output.prompt_logprobs is not None and answer["prompt_logprobs"][0] is None
    for told, known in zip(answer["prompt_logprobs"][1:], output.prompt_logprobs[1:], strict=True):
        assert known is not None
        assert {int(id): one["logprob"] for id, one in told.items()} == pytest.approx(
            {id: one.logprob for id, one in known.items()}
        )


@pytest.mark.parametrize("split", range(1, 12, 3))
def test_a_stop_string_is_never_sent(server: Served, llm: LLM, split: int) -> None:
    """Not even the beginning of it, wherever it lies in a draft."""
    text = wanted(llm, temperature=0.0).text
    stop = text[split : split + 4]
    cut = text[: text.index(stop)]
    body = {**BODY, "temperature": 0, "stop": [stop]}
    answer = server.answer(PATH, body)["choices"][0]
    assert answer["message"]["content"] == cut
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    assert streamed(server.events(PATH, body)) == {0: cut}
    kept = server.answer(PATH, {**body, "include_stop_str_in_output": True})
    assert kept["choices"][0]["message"]["content"] == cut + stop


def test_no_chunk_has_half_a_character(server: Served, llm: LLM) -> None:
    """A random byte-level model emits many bytes that are no characters; those that are must stay whole."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("東京 Grüße 👍🏽", add_special=False)
    bias = {str(id): 100 for id in ids}
    body = {**BODY, "temperature": 1.0, "max_tokens": 200, "logit_bias": bias}
    whole = server.answer(PATH, body)["choices"][0]["message"]["content"]
    chunks = server.events(PATH, body)
    assert streamed(chunks) == {0: whole}
    wanted_text = tokenizer.decode(server.answer(PATH, {**body, "return_token_ids": True})["choices"][0]["token_ids"])
    assert whole == wanted_text


def test_origins_and_trees_tell_what_was_drafted(server: Served, llm: LLM) -> None:
    body = {**BODY, "temperature": 0, "max_tokens": 120, "return_origins": True, "return_trees": True}
    output = wanted(llm, temperature=0.0, max_tokens=120)
    chunks = [chunk["choices"][0] for chunk in server.events(PATH, body)[:-1]]
    ids = [id for choice in chunks for id in choice["token_ids"]]
    origins = [origin for choice in chunks for origin in choice["origins"]]
    assert ids == output.token_ids and len(origins) == len(ids)
    assert set(origins) == {None, "suffix"}
    said: list[int] = []
    for choice in chunks:
        for tree in choice["trees"]:
            sizes = {len(tree[name]) for name in ("tokens", "texts", "parents", "origins", "confidence")}
            assert sizes == {len(tree["tokens"])} and tree["parents"][0] == -1 and tree["origins"][0] is None
            assert tree["tokens"][0] == (said or output.prompt_token_ids)[-1], "the root is the last token"
            accepted = [tree["tokens"][node] for node in tree["accepted"]]
            assert accepted == ids[len(said) : len(said) + len(accepted)]
            assert [tree["origins"][node] for node in tree["accepted"]] == origins[len(said) :][: len(accepted)]
            said += ids[len(said) : len(said) + len(accepted) + 1]
    assert said == ids
    whole = server.answer(PATH, body)["choices"][0]
    assert (whole["token_ids"], whole["origins"]) == (ids, origins)
    assert whole["trees"] == [tree for choice in chunks for tree in choice["trees"]]


def test_what_speculation_did_is_in_every_answer(server: Served) -> None:
    body = {**BODY, "temperature": 0, "max_tokens": 120}
    answer = server.answer(PATH, {**body, "return_origins": True})
    told, timings = answer["metrics"]["speculative_decoding"], answer["timings"]
    drafted = sum(origin is not None for origin in answer["choices"][0]["origins"])
    assert told["num_accepted_draft_tokens"] == timings["draft_n_accepted"] == drafted > 0
    assert told["num_draft_tokens"] == timings["draft_n"] >= drafted
    histogram = told["acceptance_histogram"]
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(length * count for length, count in enumerate(histogram)) == drafted
    assert told["mean_acceptance_length"] == pytest.approx(1 + drafted / told["num_spec_steps"])
    assert timings["predicted_n"] == 120 and timings["predicted_per_second"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == answer["usage"]["prompt_tokens"]
    last = server.events(PATH, {**body, "stream_options": {"include_usage": True}})[-2]
    assert last["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == drafted
    finishing = server.events(PATH, body)[-2]
    assert finishing["choices"][0]["finish_reason"] == "length" and "timings" in finishing


def test_a_repeated_prompt_is_found_in_the_cache(server: Served) -> None:
    long = [{"role": "user", "content": "a long prompt that fills pages " * 10}]
    for _ in range(2):
        answer = server.answer(PATH, {**BODY, "messages": long})
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < answer["usage"]["prompt_tokens"] and answer["timings"]["cache_n"] == cached


def test_continuing_the_last_message(server: Served, llm: LLM) -> None:
    messages = [*ASK, {"role": "assistant", "content": "jumps over"}]
    how = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    text = llm.chat(messages, how, add_generation_prompt=False, continue_final_message=True)[0].text
    answer = server.answer(PATH, {**BODY, "messages": messages, "continue_final_message": True})
    assert answer["choices"][0]["message"]["content"] == text


def test_messages_in_all_their_spellings(server: Served) -> None:
    plain = server.answer(PATH, {**BODY, "messages": [{"role": "system", "content": "Be kind."}, *ASK]})
    parts = [{"type": "text", "text": ASK[0]["content"]}]
    spelled = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts, "name": None}]
    assert server.answer(PATH, {**BODY, "messages": spelled})["choices"] == plain["choices"]
