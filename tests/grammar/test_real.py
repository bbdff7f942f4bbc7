"""The real SmolLM2-135M-Instruct under grammars: every drafter gives the text of plain decoding, and it is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.grammars import complete

pytestmark = [pytest.mark.real_model, pytest.mark.usefixtures("two_threads")]

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0},
        "capital": {"type": "boolean"},
        "continent": {"enum": ["Africa", "Asia", "Europe", "North America", "South America"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 2},
    },
    "required": ["city", "population", "capital", "continent", "rivers"],
    "additionalProperties": False,
}
SPECS: list[dict[str, Any]] = [
    {"json": CITY},
    {"regex": r"[A-Z][a-z]{2,12} has [1-9][0-9]{0,7} people\."},
    {"choice": ["yes", "no", "I do not know, sorry."]},
]
HOW: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.1, "logprobs": 1},
]
DRAFTERS = [
    "grammar",
    "suffix",
    "suffix+grammar",
    "eagle3",
    "medusa+grammar",
    "lookahead",
    "layer_skip:skip=8/10,depth=3",
]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, speculate=None, max_model_len=1024)


def asked() -> list[SamplingParams]:
    pairs = [(spec, how) for spec in SPECS for how in HOW]
    return [SamplingParams(structured_outputs=s, seed=i, max_tokens=90, **h) for i, (s, h) in enumerate(pairs)]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    llm.use(None)
    return answers(llm)


def answers(llm: LLM) -> list[Any]:
    return llm.chat([[{"role": "user", "content": "Tell me about Paris, in JSON."}]] * len(asked()), asked())


def test_answers_that_end_are_valid(plain: list[Any]) -> None:
    specs = [spec for spec in SPECS for _ in HOW]
    ended = [(spec, output) for spec, output in zip(specs, plain, strict=True) if output.finish_reason == "stop"]
    assert len(ended) >= 9
    for spec, output in ended:
        assert complete(spec, output.text), output.text


@pytest.mark.parametrize("speculate", DRAFTERS)
def test_every_drafter_gives_the_plain_text(llm: LLM, plain: list[Any], speculate: str) -> None:
    llm.use(speculate)
    outputs = answers(llm)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.engine.draft_faults == 0
    steps = sum(o.stats.steps for o in outputs)
    if "grammar" in speculate:
        assert steps < 0.7 * sum(o.stats.steps for o in plain)
    for logprobs, wanted in ((o.logprobs, p.logprobs) for o, p in zip(outputs, plain, strict=True)):
        assert logprobs == wanted
