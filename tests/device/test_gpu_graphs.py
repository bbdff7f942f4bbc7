"""Captured graphs on a GPU: rounds and passes are recorded and replayed, from the engine's own thread.

In emulation (see `on_gpu.py`) all can run but those of `Graphs` itself.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.gpu.graphs import Graphs
from slipstream.models.captured import CapturedPasses
from tests.device.on_gpu import DEVICE, Made, burst_of, mixed, recorded
from tests.device.test_gpu_rounds import same_texts
from tests.engine.test_rounds import TREES, asked

pytestmark = pytest.mark.gpu

needs_capture = pytest.mark.skipif(DEVICE == "cpu", reason="captures a graph")


@needs_capture
def test_a_function_is_called_once_then_recorded_and_replayed() -> None:
    graphs, calls = Graphs(DEVICE), 0
    x, total = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)

    def add() -> None:
        nonlocal calls
        calls += 1
        total.add_(x)

    for _ in range(5):
        graphs.run("add", add)
    x.fill_(10.0)
    graphs.run("add", add)
    assert calls == 2, "it is called as it is, then recorded"
    assert total.tolist() == [15.0] * 4
    assert graphs.capture_ms > 0.0


@needs_capture
def test_other_threads_may_use_the_gpu_while_one_records() -> None:
    """Allocations and synchronisation of other threads would break a capture that is not thread-local.

    Not random numbers: while any thread captures, PyTorch's own generator of that GPU serves the capture alone.
    """
    graphs, stop, errors = Graphs(DEVICE), threading.Event(), list[Exception]()
    total = torch.zeros(64, device=DEVICE)

    def disturb() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    torch.ones(256, 256, device=DEVICE).sum().item()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=disturb) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(40):
            for _ in range(3):
                graphs.run(number, lambda: total.add_(1.0))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors and total.tolist() == [120.0] * 64


@pytest.mark.parametrize("name", ["none", "eagle3", "suffix+eagle3", "parallel", "medusa"])
def test_rounds_are_recorded_and_replayed(name: str, made: Made) -> None:
    """Two halves of a round, greedy and sampled, and no more: later requests record nothing."""
    llm = made.rounds(name, TREES.get(name.rpartition("+")[2], {}), exact=True)
    burst, how = burst_of(llm), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    first = llm.generate([prompt], how)
    if DEVICE == "cuda":
        assert recorded(burst) == (1 if name == "none" else 2)
        before = burst.graphs.capture_ms
        assert before > 0.0
    again = llm.generate([prompt], how)
    same_texts(first, again)
    if DEVICE == "cuda":
        assert burst.graphs.capture_ms == before, "the same rounds were recorded again"
    same_texts(made.host(exact=True).generate([prompt], how), first)


@pytest.mark.parametrize("window", [None, 50])
def test_passes_of_the_host_are_recorded_and_give_what_others_give(
    window: int | None, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of changing sizes, filled up to a few; against the same passes, none of them recorded."""
    shape = {"exact": True, "sliding_window": window}
    captured = made.host("suffix", **shape)
    found = captured.generate(asked(3), mixed(3, top_p=0.9))
    if DEVICE == "cuda":
        (passes,) = captured.model._captured.values()  # type: ignore[attr-defined]
        assert len(passes.graphs._graphs) > 0
    monkeypatch.setattr(CapturedPasses, "takes", staticmethod(lambda segments: False))
    same_texts(made.host("suffix", **shape).generate(asked(3), mixed(3, top_p=0.9)), found)


def test_threads_ask_while_the_engine_records_on_its_own(made: Made) -> None:
    """Requests of eight threads, some of which leave: texts are right, and nothing of the engine runs elsewhere."""
    llm, plain = made.rounds("eagle3", TREES["eagle3"], exact=True), made.host(exact=True)
    prompts, how = asked(8, 60), mixed(8)
    wanted = [plain.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, how, strict=True)]
    threads: set[int] = set()
    step = llm.engine.step

    def noted() -> Any:
        threads.add(threading.get_ident())
        return step()

    llm.engine.step = noted  # type: ignore[method-assign]

    def client(number: int) -> None:
        if number % 3 == 0:
            said = list[int]()
            stream = llm.stream(prompts[number], how[number])
            for delta in stream:
                said += delta.token_ids
                if len(said) > 10:
                    break
            stream.close()  # type: ignore[attr-defined]
            assert said == wanted[number][: len(said)]
        else:
            if DEVICE == "cuda":
                torch.ones(64, 64, device=DEVICE).sum().item()
            assert llm.generate([prompts[number]], how[number])[0].token_ids == wanted[number]

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            list(pool.map(client, range(8)))
    assert threads == {llm._loop._thread.ident}
    assert llm.engine.scheduler.idle and llm.engine.draft_faults == 0 and llm.burst is not None
    assert llm.cache.available == llm.cache.capacity


def test_a_warm_up_records_what_the_first_request_replays(made: Made) -> None:
    llm = made.rounds("eagle3", TREES["eagle3"])
    llm.warm_up()
    burst = burst_of(llm)
    if DEVICE == "cuda":
        assert recorded(burst) > 0
    before = recorded(burst)
    llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert recorded(burst) == before
