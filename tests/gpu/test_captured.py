"""Passes as graphs give what passes give. Here on a CPU: the same code, called instead of captured."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams, attention
from slipstream.engine.device import DeviceRunner
from slipstream.models import captured
from slipstream.models.captured import CapturedPasses
from slipstream.models.decoder import Decoder
from tests.engine.test_rounds import asked
from tests.laned import over_tiles
from tests.tiny import plain_answers, tiny_llm

pytestmark = pytest.mark.slow


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let decoders capture their passes; how many rows each had is noted."""
    seen: list[int] = []
    original = CapturedPasses.run

    def run(self: CapturedPasses, cache: Any, store: str, segments: Any, taps: Any) -> Any:
        seen.append(sum(s.rows for s in segments))
        return original(self, cache, store, segments, taps)

    monkeypatch.setattr(attention, "over_tiles", over_tiles)
    monkeypatch.setattr(Decoder, "captures", True)
    monkeypatch.setattr(CapturedPasses, "run", run)
    return seen


def host_llm(**options: Any) -> LLM:
    return tiny_llm(context=300, characters=True, **options)


@pytest.mark.parametrize("speculate", ["none", "suffix", "ngram", "lookahead"])
@pytest.mark.parametrize("window", [None, 50])
def test_captured_passes_say_what_others_say(
    speculate: str, window: int | None, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=40),
        SamplingParams(temperature=0.8, seed=2, max_tokens=20, presence_penalty=0.5, logprobs=2),
    ]
    llm = host_llm(sliding_window=window)
    llm.use(speculate)
    monkeypatch.setattr(DeviceRunner, "possible", lambda state: False)
    llm.engine.set_runners()
    given = llm.generate(asked(3), how)
    count = len(passes)
    assert count > 20
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(Decoder, "captures", False)
        plain = host_llm(sliding_window=window).generate(asked(3), how)
    assert len(passes) == count
    for one, other in zip(plain, given, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
    assert [len(o.logprobs or ()) for o in given] == [len(o.logprobs or ()) for o in plain]


def test_short_prompts_are_captured_in_few_shapes_and_long_ones_run_as_they_are(
    passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many prompts share a pass, and wherever they begin, its shape depends on its rows alone."""
    monkeypatch.setattr(captured, "MOST_PROMPT_ROWS", 200)
    llm = host_llm()
    monkeypatch.setattr(DeviceRunner, "possible", lambda state: False)
    llm.engine.set_runners()
    how = SamplingParams(temperature=0.0, max_tokens=3)
    shapes = (1, 90), (3, 30), (2, 45), (7, 13), (1, 190), (9, 20), (1, 290), (1, 201), (2, 8), (1, 16), (1, 150)
    for count, length in shapes:
        given = llm.generate([[3 + i] * length for i in range(count)], how)
        wanted = plain_answers([[3 + i] * length for i in range(count)], how, context=300, characters=True)
        assert [one.token_ids for one in given] == [one.token_ids for one in wanted]
    assert max(passes) == 190
    model: Any = llm.model
    prompts = {shape for shape in model._captured[llm.cache]._passes if shape.rows >= 64}
    assert {shape.rows for shape in prompts} == {96, 192} and len(prompts) == 2
