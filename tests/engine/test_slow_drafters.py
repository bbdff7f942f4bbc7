"""A built-in drafter that is far too slow is dropped for the request; the text goes on, plain.

Time is simulated: a call that sleeps sets the engine's clocks forward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.drafters import DraftRequest
from slipstream.drafters.guard.stopwatch import LONG_CALLS, LONG_MS, LONG_TIMES, Stopwatch, long
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.engine import drafting, host
from slipstream.models.decoder import Decoder
from slipstream.tree import TokenTree
from tests.tiny import plain_answers, tiny_llm

PROMPTS = [[7, 3, 5, 2] * 5, [1, 2, 3] * 4]
HOW = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
FEW = {"depth": 3, "nodes": 3}  # so that there are many calls


class Clock:
    """The clock of the engine, and sleeping without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept = 0.0
        self.calls = 0
        self._monkeypatch = monkeypatch
        for module in (drafting, host):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + self.slept))

    def drafts_take(self, seconds: float, *, only: int = 0, bare: bool = False) -> None:
        """Each call of the drafter, or `only` one of them; `bare`: and then nothing is drafted."""
        inner = SuffixDrafter.propose

        def slow_propose(drafter: SuffixDrafter, requests: Seq[DraftRequest]) -> list[TokenTree]:
            self.calls += 1
            if only in (0, self.calls):
                self.slept += seconds
            return [TokenTree(r.sequence.tokens[-1]) for r in requests] if bare else inner(drafter, requests)

        self._monkeypatch.setattr(SuffixDrafter, "propose", slow_propose)

    def passes_take(self, seconds: float) -> None:
        """Each pass of the target."""
        inner = Decoder.forward

        def slow_forward(model: Decoder, *args: Any, **named: Any) -> Any:
            self.slept += seconds
            return inner(model, *args, **named)

        self._monkeypatch.setattr(Decoder, "forward", slow_forward)


def faults(clock: Clock) -> list[int]:
    """The faults of each request, whose texts must be the plain ones."""
    expected = [output.token_ids for output in plain_answers(PROMPTS, HOW)]
    llm = tiny_llm(speculate={"method": "suffix", **FEW})
    clock.calls = 0
    outputs = llm.generate(PROMPTS, HOW)
    assert [output.token_ids for output in outputs] == expected
    found = [output.stats.draft_faults for output in outputs]
    assert llm.engine.draft_faults == sum(found) and llm.cache.available == llm.cache.capacity
    return found


def test_one_call_that_sleeps_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.drafts_take(3.0, only=8)
    assert faults(clock) == [1, 1] and clock.calls == 8


@pytest.mark.parametrize("bare", [False, True])
def test_a_drafter_that_always_sleeps_is_dropped_after_a_few_calls(bare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.drafts_take(1.2, bare=bare)
    # The first may have read a long prompt; at the second the target's passes are not known yet.
    assert faults(clock) == [1, 1] and clock.calls == 2 + LONG_CALLS


def test_calls_that_sleep_between_quick_ones_are_not_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.drafts_take(1.2, only=5)
    assert faults(clock) == [0, 0] and clock.calls > 8


def test_a_draft_that_costs_fewer_passes_than_it_has_levels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.drafts_take(1.2)
    clock.passes_take(0.4)  # four tokens for 1.6 s
    assert faults(clock) == [0, 0] and clock.calls > 8


@pytest.mark.parametrize(
    ("call_ms", "pass_ms", "depth", "expected"),
    [
        (LONG_MS + 1, 1.0, 3, True),
        (LONG_MS - 1, 1.0, 3, False),  # too short to notice
        (LONG_TIMES * 4 * 1000.0 + 1, 1000.0, 3, True),
        (LONG_TIMES * 4 * 1000.0 - 1, 1000.0, 3, False),  # a big model on a slow machine
        (LONG_TIMES * 4 * 1000.0 + 1, 1000.0, 4, False),
    ],
)
def test_a_call_is_long_in_itself_and_against_the_target(
    call_ms: float, pass_ms: float, depth: int, expected: bool
) -> None:
    assert long(call_ms, pass_ms, depth) is expected


def test_a_drafter_that_stays_slow_is_dropped_sooner_for_the_next_request() -> None:
    watch = Stopwatch()
    took = [watch.took(1200.0, pass_ms=1.0) for _ in range(LONG_CALLS)]
    assert took == [False] * (LONG_CALLS - 1) + [True]
    assert not watch.took(1200.0, pass_ms=1.0, fresh=True), "it may have read a long prompt"
    assert watch.took(1200.0, pass_ms=1.0)
    assert not watch.took(1.0, pass_ms=1.0) and not watch.took(1200.0, pass_ms=1.0), "it has recovered"
