"""Vocabularies of any size: the self-check runs and says yes, and a drafter does not change the text."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.models.layers.quantized import int8_levels
from tests.tiny import tiny_directory

SIZES = [*range(2, 41), 63, 65, 1001, 16_385]


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_every_size(quantize: str) -> None:
    if quantize != "none" and not int8_levels():
        pytest.skip("8-bit GEMMs are not right on this CPU")
    for size in SIZES if quantize == "none" else SIZES[::3]:
        llm = LLM(tiny_directory(vocab_size=size), quantize=quantize, speculate="suffix", cache_tokens=1024)
        assert llm.exact, size
        prompts = [[token % size for token in range(7)] * 2, [size - 1] * 5]
        for params in (SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(seed=3, max_tokens=12)):
            drafted = [output.token_ids for output in llm.generate(prompts, params)]
            llm.use("none")
            plain = [output.token_ids for output in llm.generate(prompts, params)]
            llm.use("suffix")
            assert drafted == plain, (size, params)
            assert all(0 <= token < size for tokens in plain for token in tokens)
