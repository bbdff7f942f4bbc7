"""An engine that fails is made anew: what ran ends with an error that says so, what waited and what comes is served."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cache import PagedCache
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.engine.mailbox import Mailbox
from slipstream.errors import EngineClosed, EngineFailed
from slipstream.models.decoder import Decoder
from tests.tiny import plain_answers, tiny_llm

PROMPTS = [[1 + i, 2 + i, 3, 4, 5 + i] * (1 + i % 5) for i in range(6)]
HOW = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def once(inner: Callable[..., Any], after: int, error: Exception, *, lasting: bool = False) -> Callable[..., Any]:
    """Fails in that call, and in all after it if `lasting`."""
    calls = 0

    def fails(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after or (lasting and calls > after):
            raise error
        return inner(*args, **named)

    return fails


def texts() -> list[list[int]]:
    return [output.token_ids for output in plain_answers(PROMPTS, HOW, characters=True)]


def answer(llm: LLM, number: int) -> list[int] | Exception:
    try:
        return llm.generate([PROMPTS[number]], HOW)[0].token_ids
    except Exception as error:
        return error


@pytest.mark.parametrize("method", ["reserve", "commit", "trim", "publish"])
def test_a_fault_of_the_cache(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True, speculate="suffix")
    planted = once(getattr(PagedCache, method), 25, RuntimeError("a page is lost"))
    monkeypatch.setattr(PagedCache, method, planted)
    check_that_it_goes_on(llm, "a page is lost")


def test_a_fault_of_the_models_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True, speculate="suffix")
    monkeypatch.setattr(Decoder, "forward", once(Decoder.forward, 10, RuntimeError("no such kernel")))
    check_that_it_goes_on(llm, "no such kernel")


def test_a_fault_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True, speculate="suffix")
    kind = type(llm.engine.policy)
    monkeypatch.setattr(kind, "plan", once(kind.plan, 10, ZeroDivisionError("no such plan")))
    check_that_it_goes_on(llm, "no such plan")


def check_that_it_goes_on(llm: LLM, cause: str) -> None:
    before = llm.engine
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda number: answer(llm, number), range(6)))
    failed = [one for one in said if isinstance(one, Exception)]
    assert failed, "the planted fault ended somebody"
    for one, text in zip(said, texts(), strict=True):
        assert one == text or (isinstance(one, EngineFailed | RuntimeError) and cause in str(one)), one
    assert [answer(llm, number) for number in range(6)] == texts()
    if any(isinstance(one, EngineFailed) for one in failed):
        assert llm.engine is not before and llm._loop.status().restarts == 1
        assert all("made anew" in str(one) for one in failed)
    assert llm.engine.scheduler.idle and llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("method", ["propose", "observe", "close"])
def test_a_fault_of_a_drafter_ends_no_request(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True, speculate="suffix")
    planted = once(getattr(SuffixDrafter, method), 3, RuntimeError("no such draft"), lasting=True)
    monkeypatch.setattr(SuffixDrafter, method, planted)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda number: answer(llm, number), range(6))) == texts()
    status = llm._loop.status()
    assert status.restarts == 0 and 4 <= status.faults["suffix"] <= 6


def test_a_drafter_that_cannot_say_how_many_rows_it_needs_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, expected = tiny_llm(characters=True, speculate="suffix"), texts()
    planted = once(SuffixDrafter.scratch_rows, 1, RuntimeError("no such plan"), lasting=True)
    monkeypatch.setattr(SuffixDrafter, "scratch_rows", planted)
    outputs = llm.generate(PROMPTS, HOW)
    assert [output.token_ids for output in outputs] == expected
    assert [output.stats.draft_faults for output in outputs] == [1] * len(PROMPTS)


def test_what_waits_is_kept_and_what_runs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, outbox = tiny_llm(characters=True, max_num_seqs=2), Mailbox()
    monkeypatch.setattr(Decoder, "forward", once(Decoder.forward, 3, RuntimeError("no such kernel")))
    tickets = llm._loop.submit([llm._request(prompt, HOW) for prompt in PROMPTS], outbox)
    messages = {message.ticket: message for message in (outbox.get() for _ in PROMPTS)}
    ended = [messages[ticket] for ticket in tickets]
    assert [isinstance(message.error, EngineFailed) for message in ended] == [True] * 2 + [False] * 4
    for message, text in zip(ended[2:], texts()[2:], strict=True):
        assert message.completions is not None and message.completions[0].token_ids == text


def test_a_request_that_fails_the_engine_before_it_runs_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True)

    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("no such table")

    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "open", broken)
        failed = answer(llm, 0)
    assert isinstance(failed, EngineFailed) and "no such table" in str(failed)
    assert llm._loop.status().restarts == 2, "it was kept once"
    assert answer(llm, 0) == texts()[0]


def test_an_engine_that_cannot_be_made_anew_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True)
    monkeypatch.setattr(Decoder, "forward", once(Decoder.forward, 3, RuntimeError("no such kernel")))
    monkeypatch.setattr(Decoder, "add_store", once(Decoder.add_store, 1, MemoryError("no memory")))
    failed = answer(llm, 0)
    assert isinstance(failed, EngineFailed)
    llm._loop._thread.join(5)
    assert not llm._loop.alive
    assert isinstance(answer(llm, 0), EngineClosed)


def test_totals_outlive_the_engine_and_never_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(characters=True, speculate="suffix")
    llm.generate(PROMPTS, HOW)
    before = llm._loop.status()
    assert before.stats.emitted == 6 * HOW.max_tokens and before.prompt_tokens == sum(map(len, PROMPTS))  # type: ignore[operator]
    assert before.stats.accepted > 0 and before.tally.counts["suffix"].sum() > 0
    monkeypatch.setattr(Decoder, "forward", once(Decoder.forward, 5, RuntimeError("no such kernel")))
    assert isinstance(answer(llm, 0), EngineFailed)
    answer(llm, 1)
    after = llm._loop.status()
    assert after.stats.emitted > before.stats.emitted + HOW.max_tokens  # type: ignore[operator]
    assert after.tally.counts["suffix"].sum() >= before.tally.counts["suffix"].sum()
    assert after.pages_used == 0 and after.running == after.waiting == 0
