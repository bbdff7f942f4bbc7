"""Rounds of `suffix` alone: chains where a text repeats itself, plain rounds where it does not, and the plain text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import SamplingParams
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.engine.round_buffers import RoundBuffers
from slipstream.policy.sizes import TREE_ROUNDS, WAITING_ROUNDS
from tests.corpora import write_corpus
from tests.engine.test_repeat_rounds import LOOP, rounds_of
from tests.engine.test_rounds import asked
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import tiny_llm

NEW = [*range(10, 60)]  # nothing in it comes twice


def drafted(spec: str) -> DeviceDraft | None:
    llm = tiny_llm(context=300, characters=True)
    llm.use(spec)
    return llm.drafter.device_draft(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", ["suffix", "suffix:depth=3", "suffix:min_match=4"])
def test_rounds_say_what_plain_steps_say(spec: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [LOOP, NEW, [5] * 50, *asked(3)]
    how = [SamplingParams(temperature=temperature, seed=i, max_tokens=60 + 5 * i) for i in range(6)]
    llm = tiny_llm(context=300, characters=True)
    plain = llm.generate(prompts, how)
    llm.use(spec)
    burst_on_cpu(llm, monkeypatch)
    for asks in ([[p] for p in prompts], [prompts]):  # alone, then all together
        outputs = [output for some in asks for output in llm.generate(some, [how[prompts.index(p)] for p in some])]
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert sum(output.stats.accepted for output in outputs) > 0
        assert {origin for output in outputs for origin in output.stats.origins} == {"suffix", None}
    assert llm.engine.draft_faults == 0 and llm.cache.available == llm.cache.capacity


def test_rounds_are_plain_until_something_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    how = SamplingParams(temperature=0.0, max_tokens=40)
    llm = tiny_llm(context=300, characters=True)
    llm.use("suffix")
    rounds = rounds_of(llm, monkeypatch)
    output = llm.generate([LOOP], how)[0]
    assert TREE_ROUNDS in rounds and output.stats.accepted > 0
    llm.use("suffix:min_match=100")
    rounds = rounds_of(llm, monkeypatch)
    output = llm.generate([NEW], how)[0]
    assert set(rounds[:-1]) == {WAITING_ROUNDS} and output.stats.drafted == 0, "it has nothing to wait for, ever"


def test_plain_rounds_and_those_with_chains_are_recorded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded under a key is replayed for it: rounds with other rows must have another."""
    llm = tiny_llm(context=300, characters=True)
    llm.use("suffix")
    burst = burst_of(burst_on_cpu(llm, monkeypatch))
    record, verify = burst.graphs.run, burst._verify
    nodes: list[int] = []  # of the rounds that a function ran
    by_key: dict[object, set[int]] = {}

    def seen(buffers: RoundBuffers, *how: bool) -> None:
        nodes.append(buffers.lanes.nodes)
        verify(buffers, *how)

    def run(key: object, function: Callable[[], None]) -> None:
        nodes.clear()
        record(key, function)  # type: ignore[arg-type]
        by_key.setdefault(key, set()).update(nodes)

    monkeypatch.setattr(burst, "_verify", seen)
    monkeypatch.setattr(burst.graphs, "run", run)
    llm.generate([LOOP], SamplingParams(temperature=0.0, max_tokens=40))
    assert set().union(*by_key.values()) == {0, 16}
    assert all(len(found) <= 1 for found in by_key.values())


def test_which_chains_draft_on_the_device(tmp_path: Path) -> None:
    shapes = [
        (draft.nodes, draft.depth)
        for spec in ("suffix", "suffix:depth=5", "suffix:nodes=7")
        if (draft := drafted(spec))
    ]
    assert shapes == [(16, 16), (5, 5), (7, 7)]
    write_corpus(tmp_path / "corpus", [LOOP], tokenizer=tiny_llm(context=300, characters=True).tokenizer)
    assert drafted(f"suffix:corpus={tmp_path / 'corpus'}") is None
    assert drafted("suffix:shared=true") is None
    assert drafted("suffix:depth=0") is None
    for option in ("min_confidence=0.4", "branch=2"):  # a chain has neither: the host honours what the user sets
        assert drafted(f"suffix:{option}") is None
