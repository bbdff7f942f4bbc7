"""The developers' checks of the bench: a planted slowdown, and agreement with other programs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from benchmarks.agreement import agreement
from benchmarks.slowdown import overlap, plant
from slipstream import LLM, SamplingParams
from slipstream.bench.intervals import Interval
from slipstream.drafters.composites.merge import MergeDrafter
from slipstream.models.decoder import Decoder


class Clock:
    """The time, and what was slept."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, slept: list[float]) -> None:
        self._slept = slept

    def sleep(self, seconds: float) -> None:
        self._slept.append(seconds)
        time.sleep(seconds)


def test_a_planted_part_is_the_part_of_a_step(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 ms or more with a planted half take half as long again; the prompt's step does not."""
    forward: Any = Decoder.forward

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return forward(*args, **named)

    monkeypatch.setattr(Decoder, "forward", slowly)
    monkeypatch.setattr(MergeDrafter, "propose", MergeDrafter.propose)  # is put back after the test
    slept: list[float] = []
    with LLM(tiny, speculate="suffix+ngram") as llm:
        plant("suffix+ngram", 0.5)
        monkeypatch.setattr("benchmarks.slowdown.time", Clock(slept))
        stats = llm.generate("The quick brown", SamplingParams(temperature=0, max_tokens=40))[0].stats
    assert len(slept) == stats.steps - 2, "all but the prompt's step and the one after it"
    assert all(each >= 0.5 * 0.02 for each in slept)
    assert sum(slept) == pytest.approx(stats.decode_ms / 1000 / 3, rel=0.25)


def test_intervals_overlap() -> None:
    assert overlap(Interval(1.5, 1.4, 1.6), Interval(1.65, 1.55, 1.8))
    assert not overlap(Interval(1.5, 1.4, 1.6), Interval(1.8, 1.7, 1.9))
    assert not overlap(Interval(1.5), Interval(1.5)), "without bounds nothing is shown"


@pytest.mark.parametrize("bias", [1.0, 1.1])
def test_two_programs_agree_if_their_figures_are_alike(bias: float) -> None:
    """Prompts differ by a factor of two, both programs measure within 2%: a bias of a tenth is found all the same."""
    rng = np.random.default_rng(3)
    plain = rng.uniform(800, 1600, 40)
    speed = rng.uniform(1.2, 2.4, 40)

    def measured(factor: float) -> dict[str, dict[int, tuple[float, float]]]:
        def noise() -> float:
            return float(np.exp(0.02 * rng.standard_normal()))

        return {
            "none": {n: (96.0, float(ms) * noise()) for n, ms in enumerate(plain)},
            "d": {n: (96.0, float(ms) * noise()) for n, ms in enumerate(plain / speed / factor)},
        }

    own, bench = measured(1.0), measured(bias)
    del bench["none"][7]  # the bench asks plain decoding less often
    found = agreement("x", "d", own, bench, ["a", "b"] * 20)
    assert found.agree == (bias == 1.0)
    assert found.ratio.value == pytest.approx(bias, rel=0.02) and overlap(found.own, found.bench)
