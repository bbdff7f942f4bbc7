"""What an answer carries: log-probabilities with ranks and texts, times, and the text as the parameters want it.

The draft is the target itself, so that most tokens are accepted ones; plain decoding must say the same.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, Logprob, Output, RequestMetrics, SamplingParams
from slipstream.errors import OptionError
from slipstream.sampling import logprobs, top_tokens
from tests.tiny import tiny_directory, tiny_llm

PROMPT = "the cat sat on the mat. the cat"
SPECIAL = {95: "<a>", 96: "<b>"}  # the tiny tokenizer's


@functools.cache
def drafted() -> LLM:
    draft = {"method": "draft_model", "model": str(tiny_directory(characters=True)), "depth": 4, "nodes": 4}
    return tiny_llm(speculate=draft, characters=True)


@functools.cache
def plain() -> LLM:
    return tiny_llm(characters=True)


def both(**options: Any) -> Output:
    how = SamplingParams(**{"temperature": 0.8, "seed": 11, "max_tokens": 30, **options})
    wanted, got = plain().generate(PROMPT, how)[0], drafted().generate(PROMPT, how)[0]
    fields = ("token_ids", "text", "logprobs", "finish_reason", "stop_reason", "cumulative_logprob")
    for name in fields:
        assert getattr(got.outputs[0], name) == getattr(wanted.outputs[0], name), name
    shown = "".join(delta.text for delta in drafted().stream(PROMPT, how))
    assert shown == got.text
    return got


# -- log-probabilities ------------------------------------------------------------------------------------------------

rows = st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=9).filter(
    lambda row: max(row) > -math.inf
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(rows, st.data())
def test_ranks_are_exact_and_ties_break_by_token_id(row: list[float], data: st.DataObject) -> None:
    token, top = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) + 2))
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    logits = torch.tensor(row)
    assert top_tokens(logits, top) == order[:top]
    found = logprobs(logits, token, top, spell=str)
    assert list(found) == list(dict.fromkeys([token, *order[:top]])), "the chosen token, then the likeliest"
    exact = logits.double().log_softmax(0)
    for id, entry in found.items():
        assert (entry.rank, entry.decoded_token) == (1 + order.index(id), str(id))
        assert entry.logprob == pytest.approx(float(exact[id]), abs=1e-5)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 400])
def test_log_probabilities_of_a_prompt_are_those_of_its_tokens_as_an_answer(length: int, drafts: bool) -> None:
    """Fed in pieces, though its prefix is in the cache; and the same entries that emitted tokens have."""
    llm = tiny_llm(context=512, characters=True, speculate="suffix" if drafts else None)
    llm.engine.scheduler.prompt_rows = 128
    start = [5, 6, 7]
    how = SamplingParams(temperature=0.8, seed=1, max_tokens=400, logprobs=2, ignore_eos=True)
    said = llm.generate([start], how)[0]
    text, entries = [*start, *said.token_ids], said.logprobs or []
    asking = SamplingParams(n=2, temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=0)
    (output,) = llm.generate([text[:length]], asking)
    (again,) = llm.generate([text[:length]], SamplingParams(temperature=0.0, max_tokens=3))
    assert output.token_ids == again.token_ids == output.outputs[1].token_ids
    scored = output.prompt_logprobs
    assert scored is not None and len(scored) == length and scored[0] is None
    assert scored[3:] == entries[: max(0, length - 3)]
    assert all(token in (entry or {token: 0}) for token, entry in zip(text[:length], scored, strict=True))
    assert llm.cache.available == llm.cache.capacity


def test_logprobs_have_texts_and_add_up() -> None:
    output = both(logprobs=2)
    assert output.logprobs is not None and output.stats.emitted == 30
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert 2 <= len(entry) <= 3 and isinstance(entry[token], Logprob)
        for id, found in entry.items():
            assert found.decoded_token == SPECIAL.get(id, chr(32 + id))
    chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert [list(entry) for entry in both(logprobs=0).logprobs or ()] == [[token] for token in output.token_ids]


def test_without_logprobs_there_is_no_sum() -> None:
    output = both()
    assert output.logprobs is None and output.cumulative_logprob is None and output.prompt_logprobs is None


# -- times ------------------------------------------------------------------------------------------------------------


def test_an_output_knows_when_things_happened() -> None:
    before = time.perf_counter()
    (output,) = plain().generate(PROMPT, SamplingParams(n=2, seed=1, max_tokens=8))
    after = time.perf_counter()
    times = output.metrics
    assert output.finished and isinstance(times, RequestMetrics)
    assert times.first_token_time is not None and times.last_token_time is not None
    assert before <= times.arrival_time < times.first_token_time < times.last_token_time <= after
    assert times.time_to_first_token == times.first_token_time - times.arrival_time
    each = [choice.metrics for choice in output.outputs]
    assert times.last_token_time == max(m.last_token_time for m in each if m is not None and m.last_token_time)


# -- the text ---------------------------------------------------------------------------------------------------------

FREE: dict[str, Any] = {"logit_bias": {95: -100.0, 96: -100.0}}  # one token is one character


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_stop_string_is_part_of_the_text_if_asked_for(place: int) -> None:
    free = both(**FREE).text
    stop = free[place : place + 3]
    without = both(stop=[stop], **FREE)
    with_it = both(stop=[stop], include_stop_str_in_output=True, **FREE)
    assert without.text == free[: free.index(stop)]
    assert with_it.text == without.text + stop
    assert with_it.token_ids == without.token_ids and with_it.outputs[0].stop_reason == stop


def test_so_is_the_text_of_a_stop_token() -> None:
    free = both(**FREE)
    token = free.token_ids[4]
    first = free.token_ids.index(token)
    assert both(stop_token_ids=[token], **FREE).text == free.text[:first]
    assert both(stop_token_ids=[token], include_stop_str_in_output=True, **FREE).text == free.text[: first + 1]


def test_special_tokens_are_text_if_asked_for() -> None:
    wanted: dict[str, Any] = {"logit_bias": {95: 9.0, 96: 9.0}}
    output = both(skip_special_tokens=False, **wanted)
    assert not SPECIAL.keys().isdisjoint(output.token_ids)
    assert output.text == "".join(SPECIAL.get(token, chr(32 + token)) for token in output.token_ids)
    hidden = both(**wanted)
    assert hidden.token_ids == output.token_ids
    assert hidden.text == "".join(chr(32 + token) for token in output.token_ids if token not in SPECIAL)


def test_token_ids_alone_have_no_text() -> None:
    output = both(detokenize=False)
    assert output.text == "" and output.token_ids == both().token_ids


# -- masks ------------------------------------------------------------------------------------------------------------


def test_only_allowed_tokens_come() -> None:
    assert set(both(allowed_token_ids=[3, 50, 51], temperature=50.0).token_ids) == {3, 50, 51}


def test_bad_words_never_come_and_their_parts_do() -> None:
    free = both(**FREE).text
    words = sorted({free[i : i + 2] for i in range(0, 28, 3) if free[i] != " "} | {free[1]})
    output = both(bad_words=words, **FREE)
    assert not any(word in output.text for word in words)
    assert output.text != free and any(word[0] in output.text for word in words if len(word) == 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [97]}, r"^allowed_token_ids: there is no token 97"),
        ({"allowed_token_ids": [65], "bad_words": ["a"]}, r"^allowed_token_ids: bad_words, .* forbid every one"),
        ({"allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2}, r"^allowed_token_ids: .* forbid every"),
        ({"allowed_token_ids": [65], "logit_bias": {65: -math.inf}}, r"^allowed_token_ids: .* forbid every"),
    ],
)
def test_masks_that_leave_nothing_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plain().generate(PROMPT, SamplingParams(**options))
    assert plain().engine.scheduler.idle


def test_masks_that_leave_nothing_in_the_end_are_reported() -> None:
    with pytest.raises(OptionError, match="together forbid every token"):
        plain().generate(PROMPT, SamplingParams(allowed_token_ids=[65], bad_words=["aa"], max_tokens=4))
