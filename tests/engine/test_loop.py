"""One thread owns the engine; every client, from any thread, gets its own text, and ends no other request."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cache import PagedCache, PageTable
from slipstream.engine import host as host_module
from slipstream.engine import step as step_module
from slipstream.errors import EngineClosed
from slipstream.policy import Progress
from slipstream.verify import Match
from tests.heads import random_head
from tests.laned import burst_on_cpu
from tests.tiny import plain_answers, tiny_llm

PROMPTS = [[1 + i, 2 + i, 3, 4, 5 + i] * (1 + i % 7) for i in range(12)]


def how(number: int, **options: Any) -> SamplingParams:
    greedy = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "top_p": 0.9}
    return SamplingParams(**{"seed": number, "max_tokens": 20 + number % 17, **greedy, **options})


def wanted(prompts: list[list[int]]) -> list[list[int]]:
    llm = tiny_llm(characters=True, speculate=None)
    return [llm.generate([prompt], how(number))[0].token_ids for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("speculate", [None, "suffix", "suffix+eagle3"])
def test_thirty_two_threads_get_their_own_texts_though_some_go_away(speculate: str | None) -> None:
    """Before there was a loop: a segmentation fault, another text, an endless loop."""
    spec: Any = speculate
    if speculate == "suffix+eagle3":
        eagle = {"method": "eagle3", "checkpoint": str(random_head("eagle3")), "depth": 3, "nodes": 8}
        spec = {"method": "merge", "drafters": ["suffix", eagle]}
    llm = tiny_llm(characters=True, speculate=spec)
    texts = wanted(PROMPTS)

    def client(number: int) -> int:
        chooser, done = random.Random(number), 0
        for _ in range(6):
            which = chooser.randrange(len(PROMPTS))
            if chooser.random() < 0.5:
                assert llm.generate([PROMPTS[which]], how(which))[0].token_ids == texts[which]
                done += 1
                continue
            stream, said = llm.stream(PROMPTS[which], how(which)), list[int]()
            leaves = chooser.randrange(1, 60)
            for delta in stream:
                said += delta.token_ids
                if len(said) >= leaves:
                    break
            stream.close()  # type: ignore[attr-defined]
            assert said == texts[which][: len(said)]
            done += len(said) == len(texts[which])
        return done

    with ThreadPoolExecutor(32) as pool:
        assert sum(pool.map(client, range(32))) > 60
    assert llm.engine.scheduler.idle and llm.engine.draft_faults == 0
    assert llm.cache.available == llm.cache.capacity


def test_all_requests_of_a_call_are_in_the_first_step() -> None:
    llm, sizes = tiny_llm(), []
    step = llm.engine.step

    def noted() -> list[Progress]:
        done = step()
        sizes.append(len(done))
        return done

    llm.engine.step = noted  # type: ignore[method-assign]
    llm.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    assert sizes == [len(PROMPTS)] * 3


def test_an_interrupted_client_cancels_its_own_requests_and_nothing_else() -> None:
    llm = tiny_llm(characters=True)
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    stream = llm.stream(PROMPTS[1], long)
    said = list(next(stream).token_ids)
    step, steps, slow = llm.engine.step, 0, True

    def interrupting() -> list[Progress]:
        nonlocal steps
        if len(llm.engine.scheduler.running) >= 3:
            steps += 1
            if steps == 3:
                time.sleep(0.1)  # by then the client waits for its answers
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.002 if slow else 0)
        return step()

    llm.engine.step = interrupting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[2:5], long)
    slow = False
    assert len(llm.engine.scheduler.running) <= 1, "the interrupted ones are gone"
    for delta in stream:
        said += delta.token_ids
    assert said == plain_answers([PROMPTS[1]], long, characters=True)[0].token_ids
    assert llm.engine.scheduler.idle and llm.cache.available == llm.cache.capacity


def failing(inner: Callable[..., Any], seed: int, seen: Callable[..., int], after: int = 4) -> Callable[..., Any]:
    """Fails for the request of this seed, after a few calls."""
    calls = 0

    def fails(*args: Any, **named: Any) -> Any:
        nonlocal calls
        if seen(*args) == seed:
            calls += 1
            if calls > after:
                raise RuntimeError("planted")
        return inner(*args, **named)

    return fails


def plant(place: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """An error in this place for the request of seed 3."""

    def owner(_: PagedCache, table: PageTable, *__: Any) -> int:
        return next((int(s.request.seed) for s in llm.engine.scheduler.running if s.table is table), -1)

    seen: dict[str, Callable[..., int]] = {
        "verify": lambda _, __, target: int(target._sampler.seed),
        "emit": lambda progress: int(progress.sequence.request.seed),
    }
    where: dict[str, tuple[Any, str]] = {"verify": (Match, "__call__"), "emit": (step_module, "emit")}
    home, name = where.get(place, (PagedCache, place))
    monkeypatch.setattr(home, name, failing(getattr(home, name), 3, seen.get(place, owner), after))


@pytest.mark.parametrize(
    ("place", "bursts"),
    [*((place, False) for place in ("verify", "commit", "emit", "publish", "trim"))]
    + [(place, True) for place in ("commit", "emit", "publish", "trim")],
)
@pytest.mark.parametrize("speculate", [None, "suffix"])
def test_an_error_ends_its_own_request_after_its_tokens_are_delivered(
    place: str, bursts: bool, speculate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, texts = tiny_llm(characters=True, speculate=speculate), wanted(PROMPTS[:6])
    if bursts:
        burst_on_cpu(llm, monkeypatch)
    plant(place, llm, monkeypatch, after=1 if bursts else 4)
    said: dict[int, list[int]] = {}
    errors: dict[int, Exception] = {}

    def client(number: int) -> None:
        said[number] = []
        try:
            for delta in llm.stream(PROMPTS[number], how(number)):
                said[number] += delta.token_ids
        except RuntimeError as error:
            errors[number] = error

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(client, range(6)))
    assert list(errors) == [3] and "planted" in str(errors[3])
    assert [said[n] == texts[n] for n in range(6)] == [True, True, True, False, True, True]
    assert len(said[3]) >= (1 if bursts else 4), "what was given out before has come"
    assert said[3] == texts[3][: len(said[3])] and llm._loop.status().restarts == 0
    assert llm.engine.scheduler.idle and llm.cache.available == llm.cache.capacity


def test_a_request_that_runs_when_the_engine_is_closed_is_reported() -> None:
    llm = tiny_llm()
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=400, seed=1, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(EngineClosed, match="closed while the request was running"):
        list(stream)
    with pytest.raises(EngineClosed, match="the engine is closed"):
        llm.use("suffix")


def test_an_llm_without_references_frees_its_engine_and_its_thread() -> None:
    llm: LLM | None = tiny_llm()
    assert llm is not None
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    engine, thread = weakref.ref(llm.engine), llm._loop._thread
    llm = None
    gc.collect()
    thread.join(5)
    gc.collect()
    assert not thread.is_alive() and engine() is None


def test_loading_that_fails_raises_in_the_client_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="max_model_len"):
        tiny_llm(max_model_len=10**9)
    assert threading.active_count() == before


def test_steps_take_place_on_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, threads = tiny_llm(), set()
    launch = host_module.HostRunner.launch

    def noted(*args: Any) -> None:
        threads.add(threading.get_ident())
        launch(*args)

    monkeypatch.setattr(host_module.HostRunner, "launch", noted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: llm.generate([PROMPTS[n]], how(n)), range(8)))
    assert threads == {llm._loop._thread.ident}


def test_requests_that_arrive_while_the_engine_closes_end_with_an_error() -> None:
    """Clients of many threads, of which none waits for ever."""
    llm = tiny_llm()
    ended: list[str] = []

    def client(number: int) -> None:
        try:
            for _ in range(200):
                llm.generate([PROMPTS[number]], how(number))
                llm.use("suffix" if number % 2 else None)
        except EngineClosed as error:
            ended.append(str(error))

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(client, number) for number in range(8)]
        time.sleep(0.3)
        llm.close()
        for future in done:
            future.result(timeout=20)
    assert len(ended) == 8
