"""A round ahead: the next burst begins before the last one is given out, and nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.burst import Burst, Launched
from slipstream.lanes import Lanes
from tests.laned import burst_on_cpu
from tests.test_rounds import TREES, asked, drafting_llm
from tests.tiny import tiny_llm

NAMES = ["none", *TREES, "suffix+eagle3", "suffix+medusa"]
SMALL: dict[str, Any] = {"depth": 3, "nodes": 7, "branch": 3}
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


def drafting(name: str, **engine: Any) -> LLM:
    if name != "none":
        return drafting_llm(name, SMALL, **engine)
    llm = tiny_llm(**{"context": 300, "characters": True, **engine})
    llm.use(None)
    return llm


def bursts_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[Burst, list[Launched]]:
    """Let it decode in bursts; those that began a round ahead are written down."""
    burst = burst_on_cpu(llm, monkeypatch).engine.burst
    assert burst is not None
    go_ahead, begun = burst.go_ahead, list[Launched]()

    def noted(launched: Launched) -> None:
        go_ahead(launched)
        if burst.ahead is not None:
            begun.append(burst.ahead)

    monkeypatch.setattr(burst, "go_ahead", noted)
    return burst, begun


def plain(prompts: list[list[int]], how: Any) -> list[list[int]]:
    return [output.token_ids for output in tiny_llm(context=300, characters=True).generate(prompts, how)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_and_drafts_are_those_of_one_burst_after_the_other(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes are laid out once for a batch that goes on, however many bursts it has."""
    how = [SamplingParams(temperature=temperature, seed=i, max_tokens=120, ignore_eos=True) for i in range(3)]
    after = burst_on_cpu(drafting(name), monkeypatch, ahead=False).generate(asked(3, 60), how)
    llm = drafting(name)
    burst, begun = bursts_of(llm, monkeypatch)
    fill, laid = Lanes.fill, 0

    def counted(self: Lanes, *args: Any) -> None:
        nonlocal laid
        laid += 1
        fill(self, *args)

    monkeypatch.setattr(Lanes, "fill", counted)
    outputs = llm.generate(asked(3, 60), how)
    assert [o.token_ids for o in outputs] == plain(asked(3, 60), how)
    assert [o.stats.origins for o in outputs] == [o.stats.origins for o in after]
    assert [o.stats.steps for o in outputs] == [o.stats.steps for o in after]
    assert len(begun) > 1 and burst.ahead is None
    assert laid < len(begun) + 1
    assert {launched.collected.half for launched in begun} > {0}, "bursts take turns in the lines that they are told in"
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


def test_nothing_is_begun_where_an_answer_has_ended_or_a_prompt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting("eagle3", max_num_seqs=2)
    _, begun = bursts_of(llm, monkeypatch)
    waiting = llm.engine.scheduler.waiting
    prompts, how = asked(4, 60), [LONG] * 4
    go_ahead = llm.engine.burst.go_ahead if llm.engine.burst else None
    assert go_ahead is not None

    def checked(launched: Launched) -> None:
        assert not waiting
        go_ahead(launched)
        burst = llm.engine.burst
        if burst is not None and burst.ahead is not None:
            assert not launched.collected.any_ended(launched.rounds - 1)

    monkeypatch.setattr(llm.engine.burst, "go_ahead", checked)
    assert [o.token_ids for o in llm.generate(prompts, how)] == plain(prompts, how)
    assert begun


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_comes_in_the_middle_takes_its_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that has begun is given out, and then the newcomer is read."""
    llm = drafting(name)
    burst, _ = bursts_of(llm, monkeypatch)
    prompts = asked(2, 60)
    stream = llm.stream(prompts[0], LONG)
    given = list[int]()
    while burst.ahead is None:
        given += next(stream).token_ids
    (other,) = llm.generate([prompts[1]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    for delta in stream:
        given += delta.token_ids
    wanted = plain(prompts, LONG)
    assert given == wanted[0] and other.token_ids == wanted[1][:60]
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("joined", [False, True])
def test_whoever_is_cancelled_in_the_middle_leaves_the_others_alone(
    name: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one comes at the same time, and there are as many as before."""
    llm = drafting(name)
    burst, _ = bursts_of(llm, monkeypatch)
    prompts = asked(3, 60)
    engine = llm.engine
    one, two, three = (llm._sequences(llm._request(prompt, LONG))[0] for prompt in prompts)
    engine.scheduler.add([one, two])
    while burst.ahead is None:
        engine.step()
    engine.cancel(one)
    said, steps = len(one.output_ids), two.stats.steps
    if joined:
        engine.scheduler.add([three])
    engine.step()
    assert two.stats.steps == steps + 1, "the round that had begun, and no more"
    while not engine.scheduler.idle:
        engine.step()
    wanted = plain(prompts, LONG)
    assert two.output_ids == wanted[1] and len(one.output_ids) == said
    assert not joined or three.output_ids == wanted[2]
    assert llm.cache.available == llm.cache.capacity and engine.draft_faults == 0


def test_if_all_are_cancelled_the_next_request_finds_nothing_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting("eagle3")
    burst, _ = bursts_of(llm, monkeypatch)
    prompts = asked(2, 60)
    stream = llm.stream(prompts[0], LONG)
    while burst.ahead is None:
        next(stream)
    stream.close()
    assert llm.cache.available == llm.cache.capacity
    assert llm.generate([prompts[1]], LONG)[0].token_ids == plain(prompts, LONG)[1]


def test_a_draft_that_fails_ahead_goes_on_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting("eagle3")
    burst, begun = bursts_of(llm, monkeypatch)
    draft = burst.draft

    def broken(*args: Any) -> None:
        if begun:
            raise ValueError("no draft")
        draft(*args)

    monkeypatch.setattr(burst, "draft", broken)
    prompts = asked(2, 60)
    outputs = llm.generate(prompts, LONG)
    assert [o.token_ids for o in outputs] == plain(prompts, LONG)
    assert llm.engine.burst is None and llm.engine.draft_faults == 1
    assert llm.cache.available == llm.cache.capacity
