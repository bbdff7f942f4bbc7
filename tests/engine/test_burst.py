"""Bursts of plain decoding give what single steps give. Here on a CPU: the same code, called instead of captured."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.gpu.graphs import Graphs, bucket
from slipstream.models.decoder import Decoder
from slipstream.policy import Progress
from slipstream.policy.sizes import PLAIN_ROUNDS, SHARED_ROUNDS
from tests.laned import burst_on_cpu
from tests.tiny import plain_answers, tiny_llm

Bursting = Callable[..., LLM]


@pytest.fixture
def bursting_llm(monkeypatch: pytest.MonkeyPatch) -> Bursting:
    """An LLM that decodes in bursts."""
    return lambda **options: burst_on_cpu(tiny_llm(**options), monkeypatch)


def prompts(count: int, longest: int = 300) -> list[list[int]]:
    chooser = random.Random(count)
    return [[chooser.randrange(97) for _ in range(chooser.randrange(1, longest))] for _ in range(count)]


def steps_of(llm: LLM) -> list[list[Progress]]:
    """Records what each step of the engine returns."""
    seen: list[list[Progress]] = []
    original = llm.engine.step

    def step() -> list[Progress]:
        seen.append(original())
        return seen[-1]

    llm.engine.step = step  # type: ignore[method-assign]
    return seen


def same(plain: LLM, bursting: LLM, asked: list[list[int]], how: list[SamplingParams]) -> list[list[Progress]]:
    """Ask both and compare everything that a user can see but times; returns the steps of the second."""
    wanted = plain.generate(asked, how)
    seen = steps_of(bursting)
    given = bursting.generate(asked, how)
    for one, other in zip(wanted, given, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert left.token_ids == right.token_ids
            assert (left.text, left.finish_reason, left.stop_reason) == (
                right.text,
                right.finish_reason,
                right.stop_reason,
            )
            for name in ("steps", "emitted", "decoded", "accepted", "origins", "tokens_per_step", "lossy"):
                assert getattr(left.stats, name) == getattr(right.stats, name), name
            assert right.stats.decoded == 0 or right.stats.decode_ms > 0
    assert bursting.cache.available == bursting.cache.capacity
    return seen


@pytest.mark.parametrize("window", [None, 50])
def test_a_mixed_batch_gets_the_tokens_of_single_steps(bursting_llm: Bursting, window: int | None) -> None:
    asked = prompts(7)
    lengths = (40, 1, 2, 17, 64, 33, 16)
    how = [SamplingParams(temperature=(0.0, 0.8, 1.3)[i % 3], seed=i, max_tokens=n) for i, n in enumerate(lengths)]
    seen = same(tiny_llm(sliding_window=window), bursting_llm(sliding_window=window), asked, how)
    assert max(p.new_tokens for step in seen for p in step) == PLAIN_ROUNDS
    assert len(seen) < 12, "64 tokens took single steps"


def test_an_end_inside_a_burst_drops_what_follows(bursting_llm: Bursting) -> None:
    asked = prompts(6, 40)
    how = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, stop_token_ids=[11, 12, 13]) for i in range(6)]
    options: dict[str, Any] = {"eos": 5, "characters": True}
    seen = same(tiny_llm(**options), bursting_llm(**options), asked, how)
    ended = [p for step in seen for p in step if p.sequence.finish_reason == "stop"]
    assert {0 < p.new_tokens < PLAIN_ROUNDS for p in ended} >= {True}
    reasons = {p.sequence.stop_reason for p in ended}
    assert None in reasons and reasons & {11, 12, 13}, "both the model's own end and a stop token"


def test_the_end_of_the_context_ends_a_burst(bursting_llm: Bursting) -> None:
    asked = [[i + 1] * n for i, n in enumerate((120, 100, 90, 127))]
    how = [SamplingParams(temperature=0.5, seed=i) for i in range(4)]
    same(tiny_llm(context=128), bursting_llm(context=128), asked, how)


def test_a_full_cache_sets_the_youngest_aside_and_no_token_changes(bursting_llm: Bursting) -> None:
    asked = [[i + 1] * (90 + 20 * i) for i in range(5)]
    how = [SamplingParams(temperature=0.8, seed=i, max_tokens=120) for i in range(5)]
    tight = bursting_llm(context=384, cache_tokens=5 * PAGE_SIZE)
    seen = same(tiny_llm(context=384), tight, asked, how)
    assert tight.engine.scheduler.preemptions > 0
    assert any(p.new_tokens > 1 for step in seen for p in step)


def test_pages_that_a_burst_filled_are_shared(bursting_llm: Bursting) -> None:
    llm = bursting_llm()
    prompt = prompts(1)[0][:100]
    how = SamplingParams(temperature=0.7, seed=3, max_tokens=200)
    answer = llm.generate([prompt], how)[0].token_ids
    told = [*prompt, *answer, 1, 2, 3]
    table = llm.cache.open(told)
    assert len(table.pages) == (len(prompt) + len(answer)) // PAGE_SIZE == 2
    llm.cache.release(table)
    wanted = plain_answers([told], how)[0].token_ids
    assert llm.generate([told], how)[0].token_ids == wanted, "a shared page holds the wrong rows"


def test_a_lane_that_is_full_leaves_its_last_row_alone(bursting_llm: Bursting) -> None:
    """Its answer ends with a page, which others will read, while a longer one keeps the burst going."""
    llm, short, long = bursting_llm(), prompts(1)[0][:120], prompts(2)[1][:50]
    how = [
        SamplingParams(temperature=0.0, max_tokens=PAGE_SIZE + 1 - len(short)),
        SamplingParams(max_tokens=40, seed=1),
    ]
    answer = llm.generate([short, long], how)[0].token_ids
    told = [*short, *answer, 1, 2, 3]
    table = llm.cache.open(told)
    assert len(table.pages) == 1
    llm.cache.release(table)
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    assert llm.generate([told], greedy)[0].token_ids == plain_answers([told], greedy)[0].token_ids


def test_choices_of_one_request_and_requests_that_come_later_join(bursting_llm: Bursting) -> None:
    asked = prompts(9, 200)
    how = [SamplingParams(n=1 + i % 3, temperature=0.9, seed=i, max_tokens=20 + i) for i in range(9)]
    same(tiny_llm(max_num_seqs=4), bursting_llm(max_num_seqs=4), asked, how)


@pytest.mark.parametrize(
    "odd",
    [
        *({"logprobs": 21}, {"bad_words": ["ab" * 5]}, {"bad_words": [f"{n}." for n in range(10, 90)]}),
        {"allowed_token_ids": [21], "bad_words": ["45"]},
    ],
)
def test_a_sequence_that_needs_the_host_takes_single_steps_and_the_others_short_bursts(
    bursting_llm: Bursting, odd: dict[str, Any]
) -> None:
    asked = prompts(3, 50)
    how = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, **(odd if i == 1 else {})) for i in range(3)]
    seen = same(tiny_llm(characters=True), bursting_llm(characters=True), asked, how)
    taken = [{p.sequence.request.seed: p.new_tokens for p in step} for step in seen]
    assert {tokens.get(1, 1) for tokens in taken} == {1}, "the odd one goes by the host"
    assert max(tokens[0] for tokens in taken if {0, 1} <= tokens.keys()) == SHARED_ROUNDS
    assert sum(tokens.get(0) == SHARED_ROUNDS for tokens in taken) > 5


def test_a_stream_gets_several_tokens_at_a_time(bursting_llm: Bursting) -> None:
    llm = bursting_llm(characters=True)
    how = SamplingParams(temperature=0.9, seed=4, max_tokens=40)
    deltas = list(llm.stream([5, 6, 7], how))
    wanted = plain_answers([[5, 6, 7]], how, characters=True)[0]
    assert [t for d in deltas for t in d.token_ids] == wanted.token_ids
    assert "".join(d.text for d in deltas) == wanted.text
    assert [len(d.token_ids) for d in deltas] == [1, 16, 16, 7]
    assert deltas[-1].completion is not None


def test_cancelling_between_bursts_frees_the_pages(bursting_llm: Bursting) -> None:
    llm = bursting_llm()
    stream = llm.stream([5, 6, 7], SamplingParams(temperature=0.9, seed=4, max_tokens=400))
    for _ in range(3):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.cache.available == llm.cache.capacity


def test_prompts_do_not_stop_the_others_bursts(bursting_llm: Bursting) -> None:
    llm = bursting_llm(context=2048)
    seen = steps_of(llm)
    llm.generate(
        [[3, 4], [9] * 1500],
        [SamplingParams(temperature=0, max_tokens=60), SamplingParams(temperature=0, max_tokens=4)],
    )
    assert [p.new_tokens for p in seen[1]] == [SHARED_ROUNDS], "the long prompt is fed beside a short burst"
    assert max(p.new_tokens for step in seen for p in step) == PLAIN_ROUNDS


def test_only_engines_that_draft_on_the_device_or_not_at_all_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    assert llm.engine.device is None, "a pass on a CPU cannot be captured"
    monkeypatch.setattr(Decoder, "captures", True)
    llm.engine.set_runners()
    assert tiny_llm(verifier="rejection").engine.device is None
    for name, bursts in (("suffix", True), ("ngram", False), ("lookahead", False), (None, True)):
        llm.use(name)
        assert (llm.burst is not None) == bursts, name


def test_without_graphs_a_function_runs_each_time() -> None:
    graphs, count = Graphs("cpu"), torch.zeros(1)

    def function() -> None:
        count.add_(1)

    for _ in range(3):
        graphs.run("key", function)
    assert count.item() == 3
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 700, 769, 1024, 1025)] == [
        *(1, 2, 3, 4, 6, 6, 8),
        *(768, 1024, 1024, 1536),
    ]
