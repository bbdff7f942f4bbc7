"""Where answers end, with several tokens accepted at once: the mistakes that others made, each as a test.

The draft is the target itself, so that every step offers four tokens that would all be accepted; a cut that comes too
early or too late shows against plain decoding.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.engine.endings import emit
from slipstream.policy import Progress, Round
from slipstream.sequence import Sequence
from tests.tiny import tiny_directory, tiny_llm

PROMPT = "the cat sat on the mat. the cat"
# Without the two special tokens, which are no text, one token is one character.
FREE: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 30, "logit_bias": {95: -100.0, 96: -100.0}}


@functools.cache
def drafted() -> LLM:
    draft = {"method": "draft_model", "model": str(tiny_directory(characters=True)), "depth": 4, "nodes": 4}
    return tiny_llm(speculate=draft, characters=True)


@functools.cache
def plain() -> LLM:
    return tiny_llm(characters=True)


def both(**settings: Any) -> Any:
    how = SamplingParams(**{**FREE, **settings})
    wanted, got = plain().generate(PROMPT, how)[0], drafted().generate(PROMPT, how)[0]
    assert got.token_ids == wanted.token_ids
    assert got.text == wanted.text
    assert (got.finish_reason, got.outputs[0].stop_reason) == (wanted.finish_reason, wanted.outputs[0].stop_reason)
    assert got.stats.emitted == len(got.token_ids)
    return got


def free_tokens() -> list[int]:
    """What the model says when nothing stops it."""
    return list(both().token_ids)


@pytest.mark.parametrize("cap", range(1, 12))
def test_max_tokens_is_met_exactly(cap: int) -> None:
    output = both(max_tokens=cap)
    assert len(output.token_ids) == cap
    assert output.finish_reason == "length"


@pytest.mark.parametrize("place", range(10))
def test_a_stop_token_in_the_middle_of_an_accepted_run_ends_it_there(place: int) -> None:
    tokens = free_tokens()
    stop = tokens[place]
    first = tokens.index(stop)
    output = both(stop_token_ids=[stop])
    assert output.token_ids == tokens[: first + 1]
    assert output.finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert output.stats.accepted <= len(output.token_ids)  # nothing past the stop is counted


def test_eos_ends_the_answer_and_is_no_text() -> None:
    eos = free_tokens()[6]
    llm = tiny_llm(speculate="suffix:min_confidence=0", characters=True, eos=eos)
    output = llm.generate(PROMPT, SamplingParams(**FREE))[0]
    first = free_tokens().index(eos)
    assert output.token_ids == free_tokens()[: first + 1]
    assert output.finish_reason == "stop" and output.outputs[0].stop_reason is None
    assert len(output.text) == first
    ignoring = llm.generate(PROMPT, SamplingParams(**FREE, ignore_eos=True))[0]
    assert ignoring.token_ids == free_tokens()


@pytest.mark.parametrize("start", range(0, 12, 2))
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_stop_string_that_spans_or_starts_inside_an_accepted_run(start: int, length: int) -> None:
    text = both().text
    stop = text[start : start + length]
    output = both(stop=[stop])
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert len(output.token_ids) == text.index(stop) + length


def test_a_stop_at_the_cap_is_a_stop() -> None:
    tokens = free_tokens()
    first = tokens.index(tokens[7])
    output = both(stop_token_ids=[tokens[7]], max_tokens=first + 1)
    assert output.finish_reason == "stop"
    assert both(stop=[both().text[7]], max_tokens=both().text.index(both().text[7]) + 1).finish_reason == "stop"


@pytest.mark.parametrize("least", [1, 5, 9, 20])
def test_min_tokens_counts_tokens_and_holds_off_every_stop(least: int) -> None:
    tokens = free_tokens()
    output = both(stop_token_ids=tokens[:8], min_tokens=least)
    assert len(output.token_ids) >= least
    assert not set(output.token_ids[: least - 1]) & set(tokens[:8])
    late = both(stop=list({*both().text[:6]}), min_tokens=least)
    assert len(late.token_ids) >= least


def test_logprobs_stop_where_the_answer_stops() -> None:
    tokens = free_tokens()
    output = both(stop_token_ids=[tokens[5]], logprobs=2)
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids


def test_counters_do_not_count_past_the_end() -> None:
    output = both(max_tokens=3)
    assert output.stats.accepted <= 3
    assert sum(output.stats.accepted_by_depth) == output.stats.accepted
    assert output.stats.drafted <= 2 * output.stats.drafting_steps  # no draft can be longer than what is left


def begun(stops: list[int], cap: int) -> Sequence:
    """A sequence that has had its first token, which was none of the stops, and may have `cap` more."""
    how = SamplingParams(temperature=0.0, max_tokens=1 + cap, stop_token_ids=stops)
    sequence = plain().sequences(PROMPT, how)[0]
    sequence.first_token_at = sequence.arrived
    sequence.tokens.append(5)
    sequence.output_ids.append(5)
    return sequence


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 12), min_size=1, max_size=16),
    stops=st.lists(st.integers(0, 12), max_size=2, unique=True),
    cap=st.integers(1, 20),
    calls=st.integers(1, 3),
)
def test_plain_rounds_are_given_out_at_once_as_one_by_one(
    tokens: list[int], stops: list[int], cap: int, calls: int
) -> None:
    """Tokens, text, reasons and counters, up to the same end; in several bursts, too."""
    together, single = begun(stops, cap), begun(stops, cap)
    for _ in range(calls):
        if together.finished:
            break
        at_once = Progress(together, [Round(tokens, steps=len(tokens))])
        one_by_one = Progress(single, [Round([token]) for token in tokens])
        emit(at_once)
        emit(one_by_one)
        assert at_once.new_tokens == one_by_one.new_tokens
    for fact in ("tokens", "output_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(together, fact) == getattr(single, fact), fact
    for count in ("steps", "emitted", "decoded", "accepted", "drafted", "origins"):
        assert getattr(together.stats, count) == getattr(single.stats, count), count
    ends = [i for i, token in enumerate(tokens * calls) if token in stops]
    expected = min(len(tokens) * calls, cap, *(1 + i for i in ends[:1]))
    assert together.stats.emitted == expected
