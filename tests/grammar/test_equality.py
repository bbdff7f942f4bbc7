"""Under a grammar, every drafter gives the text of plain decoding, with every sampler and in any batch."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.types import Completion
from tests.drafters.test_conformance import CASES, SAMPLERS
from tests.grammars import END, SPECS, complete, lettered_directory, lettered_llm
from tests.tiny import tiny_draft

DRAFTERS = [
    *((name, case) for name, cases in CASES.items() for case in cases if "corpus=" not in str(case)),
    ("merge", "suffix:min_confidence=0+grammar"),
    ("merge", "grammar+prediction"),
    ("grammar", "grammar:branch=2,nodes=5,depth=3"),
]
# A sampler may leave a grammar nothing to say, and then the request fails: those lists are for free text.
HOW = {name: how for name, how in SAMPLERS.items() if not {"allowed_token_ids", "bad_words", "min_tokens"} & how.keys()}
REQUESTS = len(SPECS) * len(HOW)


@functools.cache
def engine() -> LLM:
    return LLM(lettered_directory(), speculate=None, max_num_seqs=32, cache_tokens=6 * 128)


@functools.cache
def pool() -> list[tuple[list[int], SamplingParams]]:
    chooser = random.Random(5)
    requests = []
    for number in range(REQUESTS):
        spec = list(SPECS.values())[number % len(SPECS)]
        how = list(HOW.values())[number % len(HOW)]
        prompt = [chooser.randrange(95) for _ in range(chooser.choice([1, 9, 40, 130]))]
        settings = {"seed": number, "max_tokens": chooser.choice([9, 30, 60]), "n": chooser.choice([1, 1, 2])}
        prediction = [chooser.randrange(95) for _ in range(20)] if number % 3 else None
        requests.append((prompt, SamplingParams(structured_outputs=spec, prediction=prediction, **settings, **how)))
    return requests


def say(llm: LLM, numbers: list[int]) -> list[list[Completion]]:
    asked = [pool()[number] for number in numbers]
    return [output.outputs for output in llm.generate([prompt for prompt, _ in asked], [how for _, how in asked])]


@functools.cache
def plain() -> list[list[Completion]]:
    engine().use(None)
    return [say(engine(), [number])[0] for number in range(REQUESTS)]


def test_plain_answers_are_inside_the_grammar_and_most_of_them_end() -> None:
    ended = 0
    for number, choices in enumerate(plain()):
        spec = list(SPECS.values())[number % len(SPECS)]
        for choice in choices:
            if choice.finish_reason == "stop":
                assert choice.token_ids[-1] == END and choice.token_ids.count(END) == 1
                assert complete(spec, choice.text), choice.text
                ended += 1
            else:
                assert END not in choice.token_ids
    assert ended > 20


@pytest.mark.parametrize(("name", "case"), DRAFTERS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(DRAFTERS)])
def test_every_drafter_gives_the_plain_text(name: str, case: Any) -> None:
    llm, chooser = engine(), random.Random(f"{name} {case}")
    wanted = plain()
    llm.use(tiny_draft(case))
    order = chooser.sample(range(REQUESTS), REQUESTS)
    for batch in (order[: REQUESTS // 2], order[REQUESTS // 2 :]):
        for number, choices in zip(batch, say(llm, batch), strict=True):
            assert [c.token_ids for c in choices] == [c.token_ids for c in wanted[number]]
    assert llm.engine.draft_faults == 0
    if name != "none":
        assert llm.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal", "typical"])
@pytest.mark.parametrize("spec", ["person", "regex", "choice"])
def test_nothing_outside_the_grammar_under_any_verifier(verifier: str, spec: str) -> None:
    case = {
        "method": "draft_model",
        "model": "tiny:1",
        "depth": 3,
        "nodes": 9,
        "branch": 2 if verifier != "block" else 1,
    }
    llm = lettered_llm(case, verifier)
    how = SamplingParams(structured_outputs=SPECS[spec], n=12, seed=4, max_tokens=90, temperature=1.2)
    (output,) = llm.generate([[5, 6, 7]], how)
    ended = [choice for choice in output.outputs if choice.finish_reason == "stop"]
    assert ended and all(complete(SPECS[spec], choice.text) for choice in ended)
    assert llm.engine.draft_faults == 0
    assert sum(choice.stats.accepted for choice in output.outputs) > 0
