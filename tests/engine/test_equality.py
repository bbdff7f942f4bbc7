"""A hundred thousand tokens, every drafter, every sampler, batches of all sizes: not one differs from plain decoding.

Sixty-four requests are answered plainly, each alone. Every drafter then answers all of them in one batch, and once more
in batches of random composition. The cache is small, so that requests are set aside and come back; many begin alike and
share pages; some ask for two choices; lengths differ.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.drafters.test_conformance import CASES, SAMPLERS, prompts
from tests.tiny import tiny_directory, tiny_draft

REQUESTS = 64
SPECS = [(name, case) for name, cases in CASES.items() for case in cases if name != "none"]
ENOUGH = 100_000 / len(SPECS)  # tokens that each of them has to say


@functools.cache
def engine() -> LLM:
    folder = tiny_directory(0, context=300, characters=True)
    return LLM(folder, speculate=None, max_num_seqs=REQUESTS, cache_tokens=24 * 128)


@functools.cache
def pool() -> list[tuple[list[int], SamplingParams]]:
    chooser = random.Random(1)
    stems = [[chooser.randrange(97) for _ in range(length)] for length in (5, 130, 150)]
    requests = []
    for number, own in enumerate(prompts(REQUESTS, 2)):
        prompt = (chooser.choice(stems) + own if chooser.random() < 0.5 else own)[:250]
        settings = list(SAMPLERS.values())[number % len(SAMPLERS)]
        longest, choices = chooser.choice([1, 6, 12, 28]), chooser.choice([1, 1, 1, 2])
        longest = max(longest, settings.get("min_tokens", 0))
        requests.append((prompt, SamplingParams(seed=number, max_tokens=longest, n=choices, **settings)))
    return requests


def say(llm: LLM, numbers: list[int]) -> list[list[list[int]]]:
    requests = [pool()[number] for number in numbers]
    outputs = llm.generate([prompt for prompt, _ in requests], [how for _, how in requests])
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@functools.cache
def plain() -> list[list[list[int]]]:
    llm = engine()
    llm.use(None)
    return [say(llm, [number])[0] for number in range(REQUESTS)]


@pytest.mark.parametrize(("name", "case"), SPECS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SPECS)])
def test_batches_give_the_plain_text_of_each_request_alone(name: str, case: Any) -> None:
    expected, compared = plain(), 0
    chooser = random.Random(f"{name} {case}")
    left = chooser.sample(range(REQUESTS), REQUESTS)
    batches = [list(range(REQUESTS))]
    while left:
        batches.append([left.pop() for _ in range(min(len(left), chooser.choice([1, 7, 23, 40])))])
    llm = engine()
    llm.use(tiny_draft(case))
    for batch in batches:
        said = say(llm, batch)
        assert said == [expected[number] for number in batch]
        compared += sum(len(choice) for choices in said for choice in choices)
    assert llm.engine.scheduler.preemptions > 0 and llm.engine.draft_faults == 0
    assert compared >= ENOUGH
