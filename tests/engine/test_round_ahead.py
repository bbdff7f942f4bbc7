"""A round ahead: the next burst starts before the last one is emitted, without a visible difference."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine import step as step_module
from slipstream.engine.burst import Burst
from slipstream.engine.launched import Launched
from slipstream.gpu.lanes import Lanes
from slipstream.policy import Progress
from tests.engine.test_rounds import TREES, asked, drafting_llm
from tests.laned import burst_of, burst_on_cpu
from tests.stepping import stepped
from tests.tiny import plain_answers, tiny_llm

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
    burst = burst_of(burst_on_cpu(llm, monkeypatch))
    go_ahead, begun = burst.go_ahead, list[Launched]()

    def noted(launched: Launched) -> None:
        go_ahead(launched)
        if burst.ahead is not None:
            begun.append(burst.ahead)

    monkeypatch.setattr(burst, "go_ahead", noted)
    return burst, begun


def plain(prompts: list[list[int]], how: Any) -> list[list[int]]:
    return [output.token_ids for output in plain_answers(prompts, how, context=300, characters=True)]


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
    assert {launched.collected.first_line for launched in begun} > {0}, (
        "bursts take turns in the lines that they are told in"
    )
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


def test_nothing_is_begun_where_an_answer_has_ended_or_a_prompt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting("eagle3", max_num_seqs=2)
    burst, begun = bursts_of(llm, monkeypatch)
    go_ahead, waited, ended = burst.go_ahead, list[bool](), list[bool]()

    def noted(launched: Launched) -> None:
        go_ahead(launched)
        waited.append(bool(llm.engine.scheduler.waiting))
        if burst.ahead is not None:
            ended.append(launched.collected.any_ended(launched.rounds - 1))

    monkeypatch.setattr(burst, "go_ahead", noted)
    prompts, how = asked(4, 60), [LONG] * 4
    assert [o.token_ids for o in llm.generate(prompts, how)] == plain(prompts, how)
    assert len(begun) == len(ended) < len(waited)
    assert not any(waited) and not any(ended)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_comes_in_the_middle_takes_its_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that has begun is given out, and then the newcomer is read."""
    llm = drafting(name)
    burst, _ = bursts_of(llm, monkeypatch)
    prompts = asked(2, 60)
    stream = stepped(llm, prompts[0], LONG)
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
def test_a_request_cancelled_in_the_middle_leaves_the_others_alone(
    name: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one comes at the same time, and there are as many as before."""
    llm = drafting(name)
    burst, _ = bursts_of(llm, monkeypatch)
    prompts = asked(3, 60)
    engine = llm.engine
    one, two, three = (llm.sequences(prompt, LONG)[0] for prompt in prompts)
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
    stream = stepped(llm, prompts[0], LONG)
    while burst.ahead is None:
        next(stream)
    stream.close()
    assert llm.cache.available == llm.cache.capacity
    assert llm.generate([prompts[1]], LONG)[0].token_ids == plain(prompts, LONG)[1]


@pytest.mark.parametrize(
    ("name", "part", "late"),
    [
        *((name, "verify", late) for name in ("none", "eagle3", "medusa") for late in (False, True)),
        *((name, "draft", False) for name in ("eagle3", "medusa")),
    ],
)
@pytest.mark.parametrize("healed", [False, True])
def test_what_fails_ahead_is_tried_again_where_nothing_has_been_given_out(
    name: str, part: str, late: bool, healed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are there reach their readers first. Only if it fails again a draft goes on by the host. `late`: the
    lanes have moved on by then.
    """
    llm = drafting(name)
    burst, _ = bursts_of(llm, monkeypatch)
    healthy, go_ahead = getattr(burst, part), burst.go_ahead
    failing, failures = False, 0

    def ahead(launched: Launched) -> None:
        nonlocal failing
        failing = True
        try:
            go_ahead(launched)
        finally:
            failing = not healed

    def broken(*args: Any) -> None:
        nonlocal failures
        if not failing or late:
            healthy(*args)
        if failing:
            failures += 1
            raise ValueError("it does not work")

    monkeypatch.setattr(burst, part, broken)
    monkeypatch.setattr(burst, "go_ahead", ahead)
    prompts = asked(2, 60)
    streams = [stepped(llm, prompt, LONG) for prompt in prompts]
    given: list[list[int]] = [[], []]
    wanted = plain(prompts, LONG)
    target_fails = name == "none" and not healed
    try:
        for number, stream in enumerate(streams):
            for delta in stream:
                given[number] += delta.token_ids
    except ValueError:
        assert target_fails, "the target may not fail, and says so"
    assert failures > 0 and all(said == text[: len(said)] for said, text in zip(given, wanted, strict=True))
    assert target_fails or given == wanted
    assert llm.engine.draft_faults == (0 if healed or target_fails else 1)
    for stream in streams:
        stream.close()
    assert llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_in_the_middle_leaves_the_others_their_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the next round has begun, and the tokens that this builds on have not all been given out."""
    llm = drafting(name)
    burst, begun = bursts_of(llm, monkeypatch)
    emit = step_module.emit

    def interrupted(progress: Progress) -> None:
        if burst.ahead is not None and len(begun) == 2:
            begun.append(burst.ahead)
            raise KeyboardInterrupt
        emit(progress)

    monkeypatch.setattr(step_module, "emit", interrupted)
    prompts = asked(2, 60)
    one, two = (llm.sequences(prompt, LONG)[0] for prompt in prompts)
    llm.engine.scheduler.add([one, two])
    with pytest.raises(KeyboardInterrupt):
        while not llm.engine.scheduler.idle:
            llm.engine.step()
    assert burst.ahead is None
    llm.engine.cancel(one)
    while not llm.engine.scheduler.idle:
        llm.engine.step()
    assert two.output_ids == plain(prompts, LONG)[1]
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


def test_time_between_two_steps_is_charged_to_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that has begun waits for its reader, who takes his time."""
    llm = drafting("none")
    burst, _ = bursts_of(llm, monkeypatch)
    now = 0.0
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + now)
    one, two = (llm.sequences(prompt, LONG)[0] for prompt in asked(2, 60))
    llm.engine.scheduler.add([one])
    while burst.ahead is None:
        llm.engine.step()
    now = 1000.0
    llm.engine.scheduler.add([two])
    llm.engine.step()
    assert one.stats.other_ms >= 0 and one.stats.verify_ms < 500_000
    llm.engine.cancel(one)
    llm.engine.cancel(two)
