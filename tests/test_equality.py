"""A hundred thousand tokens, every drafter, random samplers, random batches: not one differs from plain decoding.

A pool of requests is answered plainly, each request alone. Every drafter then answers the whole pool in batches of
random composition. The cache is small, so that requests are set aside and come back; many begin alike and share pages;
some ask for two choices; lengths differ.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.test_conformance import CASES, SAMPLERS
from tests.tiny import tiny_directory, tiny_draft

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 100_000
REQUESTS = 56
SPECS = [(name, case) for name, cases in CASES.items() for case in cases if name != "none"]

compared = 0


@functools.cache
def engine() -> LLM:
    folder = tiny_directory(0, context=300, characters=True)
    return LLM(folder, speculate=None, max_num_seqs=24, cache_tokens=24 * 128)


@functools.cache
def pool() -> list[tuple[list[int], SamplingParams]]:
    chooser = random.Random(1)
    stems = [[chooser.randrange(97) for _ in range(length)] for length in (5, 130, 150)]
    requests = []
    for number in range(REQUESTS):
        own = [chooser.randrange(97) for _ in range(chooser.randrange(1, 40))] * chooser.choice([1, 1, 3])
        prompt = (chooser.choice(stems) + own if chooser.random() < 0.5 else own)[:250]
        settings = {k: v for k, v in chooser.choice(list(SAMPLERS.values())).items() if k != "min_tokens"}
        longest, choices = chooser.choice([3, 20, 49, 80]), chooser.choice([1, 1, 1, 2])
        requests.append((prompt, SamplingParams(seed=number, max_tokens=longest, n=choices, **settings)))
    return requests


def say(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    outputs = llm.generate([prompt for prompt, _ in requests], [how for _, how in requests])
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@functools.cache
def plain() -> list[list[list[int]]]:
    llm = engine()
    llm.use(None)
    return [say(llm, [request])[0] for request in pool()]


@pytest.mark.parametrize(("name", "case"), SPECS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SPECS)])
def test_random_batches_say_what_plain_decoding_says(name: str, case: Any) -> None:
    global compared
    expected = plain()
    chooser = random.Random(f"{name} {case}")
    order = chooser.sample(range(REQUESTS), REQUESTS)
    llm = engine()
    llm.use(tiny_draft(case))
    while order:
        batch = [order.pop() for _ in range(min(len(order), chooser.choice([1, 7, 23, 40])))]
        said = say(llm, [pool()[number] for number in batch])
        assert said == [expected[number] for number in batch]
        compared += sum(len(choice) for choices in said for choice in choices)
    assert llm.engine.draft_faults == 0


def test_enough_was_compared(request: pytest.FixtureRequest) -> None:
    if sum("test_random_batches" in item.name for item in request.session.items) < len(SPECS):
        pytest.skip("only some of the drafters were asked for")
    assert compared >= TOKENS
