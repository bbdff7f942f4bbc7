"""Ordinary requests run in rounds: whatever they ask for, the text, the ends and the log-probabilities are the host's.

Here on a CPU: the same code as on a GPU, called instead of captured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.host import HostRunner
from slipstream.policy.sizes import PLAIN_ROUNDS
from slipstream.sequence import Sequence
from slipstream.types import Logprobs, Output, Plan
from tests.drafters.test_conformance import CASES as REGISTRY
from tests.engine.test_rounds import TREES, asked, drafting_llm
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import plain_answers, tiny_draft, tiny_llm

KINDS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "cuts": {"temperature": 1.4, "top_k": 12, "top_p": 0.7, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.5},
    "greedy repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    "penalties": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3, "top_p": 0.9},
    "bias": {"logit_bias": {3: 4.0, 50: -2.5, 70: float("-inf")}},
    "allowed": {"allowed_token_ids": [*range(20, 60)], "top_k": 9},
    "bad words": {"bad_words": ["a", "bc", "xyz", "0"], "temperature": 1.3},
    "min_tokens": {"min_tokens": 12, "temperature": 1.2, "stop_token_ids": [11, 12, 13, 14, 15]},
    "logprobs": {"logprobs": 3},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 20},
    "own logprobs": {"logprobs": 0, "top_p": 0.9, "frequency_penalty": 0.2},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "stop": {"stop": ["e", "q7"], "temperature": 1.1},
    "late stop": {"stop": ["e", "t", "a"], "min_tokens": 9},
    "choices": {"n": 3, "top_p": 0.9, "logprobs": 1},
}
DRAFTERS = ["none", *TREES, "suffix", "suffix+eagle3", "suffix+medusa"]
SMALL: dict[str, Any] = {"depth": 4, "nodes": 20, "branch": 6}
ENGINE: dict[str, Any] = {"context": 300, "characters": True, "eos": 5}


def requests(kinds: dict[str, dict[str, Any]] = KINDS) -> tuple[list[list[int]], list[SamplingParams]]:
    """One request of each kind; every other text repeats itself."""
    chooser, prompts, how = random.Random(7), [], []
    for number, kind in enumerate(kinds.values()):
        motif = [chooser.randrange(6, 97) for _ in range(3 + number)]
        prompts.append(motif * 3 if number % 2 else motif)
        how.append(SamplingParams(**{"temperature": 0.9, "seed": number, "max_tokens": 30 + number, **kind}))
    return prompts, how


def drafting(name: str) -> LLM:
    if name in ("none", "suffix"):
        llm = tiny_llm(**ENGINE)
        llm.use(None if name == "none" else name)
        return llm
    return drafting_llm(name, SMALL, **ENGINE)


def seen(output: Output) -> list[Any]:
    """All that a user gets but times and counters. The logits of two kinds of attention differ in their last bits."""
    told = [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, list(map(scores, one.logprobs or [])))
        for one in output.outputs
    ]
    return [*told, list(map(scores, output.prompt_logprobs or []))]


def scores(logprobs: Logprobs | None) -> list[Any]:
    """Tokens in order, their ranks, their texts, and their log-probabilities."""
    return [
        (id, one.rank, one.decoded_token, pytest.approx(one.logprob, abs=1e-4)) for id, one in (logprobs or {}).items()
    ]


@contextmanager
def by_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence]]:
    """Writes down the sequences that take a decoding step of the host after their first token."""
    launch, found = HostRunner.launch, list[Sequence]()

    def noted(self: HostRunner, part: list[Any], plans: dict[Sequence, Plan]) -> None:
        found.extend(item.sequence for item in part if item.sequence.first_token_at is not None)
        launch(self, part, plans)

    with monkeypatch.context() as patch:
        patch.setattr(HostRunner, "launch", noted)
        yield found


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kind_of_request_runs_in_rounds_and_gets_what_the_host_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, how = requests()
    wanted = plain_answers(prompts, how, **ENGINE)
    llm = burst_on_cpu(drafting(name), monkeypatch)
    with by_host(monkeypatch) as found:
        given = llm.generate(prompts, how)
    for kind, one, other in zip(KINDS, wanted, given, strict=True):
        assert seen(one) == seen(other), kind
    assert found == [] and llm.engine.draft_faults == 0
    assert llm.cache.available == llm.cache.capacity
    if name not in ("none", "suffix"):
        assert sum(output.stats.accepted for output in given) > 20
    stopped = {output.finish_reason for output in given}
    assert stopped == {"stop", "length"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_each_kind_alone(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is the one that decides how much a round computes."""
    prompts, how = requests({kind: KINDS[kind]})
    wanted = plain_answers(prompts, how, **ENGINE)
    llm = burst_on_cpu(drafting(name), monkeypatch)
    with by_host(monkeypatch) as found:
        (given,) = llm.generate(prompts, how)
    assert seen(given) == seen(wanted[0]) and found == []


MIXED: list[dict[str, Any]] = [
    *[{"temperature": 0.0}] * 4,
    *[{"temperature": 0.8, "top_p": 0.95}] * 4,
    *({"temperature": 0.8, "stop": ["qu", "7"]}, {"temperature": 0.0, "stop": ["!"]}) * 2,
    *({"repetition_penalty": 1.2}, {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.1}),
    *({"temperature": 0.0, "logprobs": 5}, {"logprobs": 1}),
]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_mixed_batch_of_sixteen_has_the_same_bursts_as_a_plain_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody leaves the rounds, nobody shortens them, and nobody's text depends on the others."""
    prompts = asked(16, 60)
    how = [SamplingParams(**{"seed": i, "max_tokens": 40, "ignore_eos": True, **kind}) for i, kind in enumerate(MIXED)]
    llm = burst_on_cpu(drafting(name), monkeypatch)
    with by_host(monkeypatch) as found:
        given = llm.generate(prompts, how)
    wanted = plain_answers(prompts, how, **ENGINE)
    assert [seen(one) for one in given] == [seen(one) for one in wanted]
    assert found == []
    again = burst_on_cpu(drafting(name), monkeypatch)
    alone = [again.generate([prompt], params)[0] for prompt, params in list(zip(prompts, how, strict=True))[::5]]
    assert [seen(one) for one in alone] == [seen(one) for one in wanted[::5]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculate",
    [pytest.param(case, id=f"{name}-{i}") for name, cases in REGISTRY.items() for i, case in enumerate(cases)],
)
def test_every_drafter_of_the_registry_is_invisible_with_every_sampler(
    speculate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are rounds for it, in rounds; otherwise by the host, beside the rounds of others."""
    prompts, how = requests()
    wanted = plain_answers(prompts, how, **ENGINE)
    llm = burst_on_cpu(tiny_llm(**ENGINE), monkeypatch)
    llm.use(tiny_draft(speculate))
    assert [seen(one) for one in llm.generate(prompts, how)] == [seen(one) for one in wanted]
    assert llm.cache.available == llm.cache.capacity


def test_a_stop_string_ends_a_burst_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for while the next round runs; at most one more has begun."""
    prompt, seed = [5, 6, 7], 3
    whole = plain_answers([prompt], SamplingParams(seed=seed, max_tokens=60, ignore_eos=True), **ENGINE)[0]
    stop = whole.text[6:8]
    how = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, stop=stop)
    wanted = plain_answers([prompt], how, **ENGINE)[0]
    llm = burst_on_cpu(drafting("none"), monkeypatch)
    burst, rounds = burst_of(llm), 0
    verify = burst.verify

    def counted(*args: Any) -> None:
        nonlocal rounds
        rounds += 1
        verify(*args)

    monkeypatch.setattr(burst, "verify", counted)
    (given,) = llm.generate([prompt], how)
    assert seen(given) == seen(wanted) and given.outputs[0].stop_reason == stop
    assert rounds <= len(given.token_ids) + 1 < PLAIN_ROUNDS


def test_stops_are_found_across_bursts_and_rounds_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = asked(6, 40)
    whole = plain_answers(prompts, SamplingParams(seed=1, max_tokens=120, ignore_eos=True), **ENGINE)
    places = (1, 16, 17, 33, 50, 90)
    how = [
        SamplingParams(seed=1, max_tokens=120, ignore_eos=True, stop=[one.text[place : place + 4], "~~~"])
        for one, place in zip(whole, places, strict=True)
    ]
    wanted = plain_answers(prompts, how, **ENGINE)
    for name in ("none", "eagle3"):
        given = burst_on_cpu(drafting(name), monkeypatch).generate(prompts, how)
        assert [seen(one) for one in given] == [seen(one) for one in wanted]
        assert {one.finish_reason for one in given} == {"stop"}
