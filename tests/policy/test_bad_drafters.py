"""Planted drafters: each kind changes no token, is soon left alone, and costs little. The clock only counts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.drafters import Drafter, DraftOptions
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.registry import DrafterSpec
from slipstream.tree import TokenTree
from tests.policy.virtual_clock import VirtualClock
from tests.tiny import tiny_llm

REQUESTS, TOKENS, PASS_MS, ROW_MS = 40, 64, 10.0, 0.5
NEVER = 0  # a token that the tiny model never says


class Bad(Drafter[DraftOptions]):
    """The base of the planted ones."""

    name = "bad"
    summary = helps = cost = "a planted fault"
    options_type = DraftOptions
    call_ms = 1.0
    calls = 0
    clock: VirtualClock | None = None

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        assert self.clock is not None
        type(self).calls += 1
        self.clock.ms += self.call_ms
        return [self.tree(request) for request in requests]

    def tree(self, request: DraftRequest) -> TokenTree:
        """Six guesses of which none is right, and which say so."""
        return self.chain(request, [7 * (n + self.calls) % 90 for n in range(6)], 0.3)

    @staticmethod
    def chain(request: DraftRequest, tokens: list[int], sure: float) -> TokenTree:
        tree, node = TokenTree(request.sequence.tokens[-1]), 0
        for depth, token in enumerate(tokens[: request.plan.depth], 1):
            node = tree.add(node, token, origin="bad", confidence=sure**depth)
        return tree


class Guesses(Bad):
    pass


class SureAndWrong(Bad):
    def tree(self, request: DraftRequest) -> TokenTree:
        return self.chain(request, [NEVER] * 6, 0.999)


class Sleeps(Bad):
    call_ms = 50.0


class Raises(Bad):
    def tree(self, request: DraftRequest) -> TokenTree:
        raise RuntimeError("planted")


class NotANumber(Bad):
    def tree(self, request: DraftRequest) -> TokenTree:
        return self.chain(request, [1], float("nan"))


KINDS = [Guesses, SureAndWrong, Sleeps, Raises, NotANumber]


def planted(kind: type[Bad], monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, VirtualClock]:
    """An engine whose `auto` picks from this drafter alone."""
    llm = tiny_llm(context=300, speculate=None)

    class Spec(DrafterSpec):
        def build(self, target: Any) -> Any:
            return kind(DraftOptions(), target)

        def checked(self) -> DraftOptions:
            return DraftOptions()

    llm.use(DrafterSpec("auto", {"drafters": (Spec("bad"),)}))
    clock = VirtualClock(llm, lambda rows: PASS_MS + ROW_MS * (rows - 1), monkeypatch)
    kind.calls, kind.clock = 0, clock
    return llm, clock


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_drafter_changes_no_token_and_costs_little(kind: type[Bad], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, clock = planted(kind, monkeypatch)
    prompt = [5, 6, 7, 8] * 4

    def answer(**how: Any) -> tuple[float, Any]:
        llm.reset_prefix_cache()
        began = clock.ms
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, **how)
        (output,) = llm.generate([prompt], params)
        return clock.ms - began, output

    plain_ms, plain = answer(speculate=False)
    assert NEVER not in plain.token_ids
    spent = []
    for _ in range(REQUESTS):
        ms, output = answer()
        assert output.token_ids == plain.token_ids
        spent.append(ms)
    assert kind.calls > 0
    assert sum(spent[1:]) <= 1.03 * plain_ms * (REQUESTS - 1), "the first request may lose more"
    assert spent[0] <= plain_ms + 8 * kind.call_ms + 10 * 6 * ROW_MS
    if kind in (Raises, NotANumber):
        assert kind.calls <= REQUESTS, "dropped for a request after one call"
        assert 0 < llm.engine.draft_faults <= REQUESTS


@pytest.mark.parametrize("kind", [SureAndWrong, Sleeps])
def test_a_bad_drafter_costs_little_in_a_batch(kind: type[Bad], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, clock = planted(kind, monkeypatch)
    prompts = [[5, 6, 7, 8 + number] * 4 for number in range(8)]
    spent = {}
    for speculate in (False, None):
        began = clock.ms
        for _ in range(6):
            llm.reset_prefix_cache()
            how = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, speculate=speculate)
            outputs = llm.generate(prompts, how)
        spent[speculate] = clock.ms - began
        assert len(outputs) == len(prompts)
    assert kind.calls > 0
    assert spent[None] <= 1.03 * spent[False] + 2 * kind.call_ms
