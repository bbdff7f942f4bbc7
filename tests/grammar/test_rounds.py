"""Grammars in device rounds: the text is the host's, and nobody else notices. Here on a CPU, called not captured."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.constrained import ConstrainedBurst, _Checks
from slipstream.errors import OptionError
from slipstream.grammar import Constraint
from slipstream.policy.sizes import SHARED_ROUNDS
from slipstream.sequence import Sequence
from tests.drafters.test_conformance import prompts
from tests.engine.test_ordinary_rounds import by_host, seen
from tests.grammar.test_engine import EXPLOSIVE
from tests.grammars import END, PERSON, SPECS, complete, lettered_llm
from tests.heads import random_head
from tests.laned import burst_on_cpu

HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "cuts": {"temperature": 1.2, "top_k": 7, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "logprobs": 2},
    "all": {"temperature": 1.0, "presence_penalty": 0.5, "top_p": 0.8, "logit_bias": {3: 2.0, 40: -3.0}},
}
TREE = {"depth": 4, "nodes": 40, "branch": 12}


def named(name: str) -> Any:
    *beside, method = name.split("+")
    if method in ("none", "suffix", "grammar", "prediction"):
        return name
    head = {"method": method, "checkpoint": str(random_head(method)), **TREE}
    return {"method": "merge", "drafters": [*beside, head]} if beside else head


def in_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return burst_on_cpu(lettered_llm(None if name == "none" else named(name)), monkeypatch)


def asked(kind: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """A request of each grammar."""
    texts = prompts(len(SPECS), 3)
    params = [
        SamplingParams(structured_outputs=spec, seed=number, max_tokens=40 + number, **HOW[kind])
        for number, spec in enumerate(SPECS.values())
    ]
    return texts, params


@functools.cache
def plain(kind: str) -> list[list[Any]]:
    """What the host says without drafts."""
    return [seen(one) for one in lettered_llm().generate(*asked(kind))]


@pytest.mark.parametrize("kind", HOW)
@pytest.mark.parametrize("name", ["none", "suffix", "eagle3", "suffix+eagle3"])
def test_rounds_say_what_the_host_says(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, how = asked(kind)
    llm = in_rounds(name, monkeypatch)
    with by_host(monkeypatch) as found:
        given = llm.generate(texts, how)
        (alone,) = llm.generate(texts[:1], how[0])
    assert [seen(one) for one in given] == plain(kind)
    assert seen(alone) == plain(kind)[0]
    assert found == [] and llm.engine.draft_faults == 0
    assert llm.cache.available == llm.cache.capacity
    for spec, one in zip(SPECS.values(), given, strict=True):
        assert (END in one.token_ids) == (one.finish_reason == "stop")
        if one.finish_reason == "stop":
            assert one.token_ids.index(END) == len(one.token_ids) - 1 and complete(spec, one.text)
    if name == "eagle3":
        assert sum(one.stats.accepted for one in given) > 5


@pytest.mark.parametrize("name", ["grammar", "prediction", "suffix+grammar", "auto"])
def test_drafters_that_read_what_a_request_brings_go_by_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = in_rounds("none", monkeypatch)
    llm.use(name)
    with by_host(monkeypatch) as found:
        given = llm.generate(*asked("sampled"))
    assert [seen(one) for one in given] == plain("sampled")
    assert found


def test_lists_beside_a_grammar_go_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they may leave no token, which rounds do not look for."""
    lists: list[dict[str, Any]] = [
        {"bad_words": ["Q", "Zz"]},
        {"allowed_token_ids": [*range(96), END]},
        {"min_tokens": 5},
        {"logit_bias": {56: float("-inf")}},
    ]
    how = [SamplingParams(structured_outputs={"json": PERSON}, seed=1, max_tokens=50, **one) for one in lists]
    texts = prompts(len(how), 3)
    wanted = lettered_llm().generate(texts, how)
    llm = in_rounds("none", monkeypatch)
    with by_host(monkeypatch) as found:
        given = llm.generate(texts, how)
    assert [seen(one) for one in given] == [seen(one) for one in wanted]
    assert len({sequence.request.id for sequence in found}) == len(how)


@pytest.mark.parametrize("kind", ["sampled", "top_p"])
def test_a_mask_is_made_only_where_it_is_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuts where a choice was refused, once; with cuts for every node inside the grammar, before the choice."""
    llm = in_rounds("eagle3", monkeypatch)
    made: list[bool] = []  # whether a choice was refused
    before, refused, forbidden = 0, _Checks.refused, Constraint.forbidden

    def noted(self: _Checks, lane: int, sequence: Sequence) -> bool:
        made.append(refused(self, lane, sequence))
        return made[-1]

    def counted(self: Constraint, path: Any) -> Any:
        nonlocal before
        before += 1
        return forbidden(self, path)

    monkeypatch.setattr(_Checks, "refused", noted)
    texts, how = asked(kind)
    for text, one in zip(texts, how, strict=True):
        llm.generate([text], one)
    rounds = made.count(False)
    assert rounds > 50
    if kind == "top_p":
        assert made.count(True) == 0, "a choice under its mask is allowed"
        return
    assert made.count(True) > 0
    made.clear()
    monkeypatch.setattr(Constraint, "forbidden", counted)
    (output,) = llm.generate([texts[0]], how[0])
    in_prompt_step = 1
    assert made.count(True) <= before <= made.count(True) + in_prompt_step < len(output.token_ids)


def test_the_others_stay_in_rounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(6, 2)
    how = [
        SamplingParams(
            seed=number,
            max_tokens=40 + number,
            temperature=0.8,
            structured_outputs={"json": PERSON} if number % 3 == 1 else None,
        )
        for number in range(6)
    ]
    wanted = lettered_llm().generate(texts, how)
    for name in ("none", "eagle3"):
        llm = in_rounds(name, monkeypatch)
        device = llm.engine.device
        assert device is not None
        launched: list[tuple[bool, int, set[bool]]] = []
        launch = device.launch

        def noted(part: Any, plans: Any, launch: Any = launch, device: Any = device, told: Any = launched) -> None:
            launch(part, plans)
            for burst, one in device._launched:
                held = {sequence.constraint is not None for sequence in one.sequences}
                told.append((isinstance(burst, ConstrainedBurst), one.rounds, held))

        monkeypatch.setattr(device, "launch", noted)
        with by_host(monkeypatch) as found:
            given = llm.generate(texts, how)
        assert [seen(one) for one in given] == [seen(one) for one in wanted]
        assert found == []
        assert all(held == {constrained} for constrained, _, held in launched)
        assert {rounds for constrained, rounds, _ in launched if constrained} == {1}
        free = [rounds for constrained, rounds, _ in launched if not constrained]
        assert SHARED_ROUNDS in free


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_grammar_that_fails_ends_its_own_request_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = in_rounds(name, monkeypatch)
    fine = SamplingParams(structured_outputs={"json": PERSON}, seed=3, max_tokens=80)
    (wanted,) = lettered_llm().generate([[1]], fine)
    healthy = Constraint.allows

    def failing(self: Constraint, path: Any, token: int) -> bool:
        if len(self._output) > 5 and self._output[0] == ord("b") - 32:
            raise OptionError("structured_outputs: a limit")
        return healthy(self, path, token)

    monkeypatch.setattr(Constraint, "allows", failing)
    stream = llm.stream([1], fine)
    given = list(next(stream).token_ids)
    with pytest.raises(OptionError, match="a limit"):
        llm.generate([[2]], SamplingParams(structured_outputs={"regex": "b[a-z]{40}"}, seed=1, max_tokens=60))
    with pytest.raises(OptionError, match=r"^structured_outputs: .*items"):
        llm.generate([[2]], SamplingParams(structured_outputs=EXPLOSIVE["crowd"], seed=1, max_tokens=60))
    for delta in stream:
        given += delta.token_ids
    assert given == wanted.token_ids
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


def test_choices_and_stops_under_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    how = [
        SamplingParams(structured_outputs={"json": PERSON}, n=4, seed=2, max_tokens=90),
        SamplingParams(structured_outputs={"json": PERSON}, seed=2, max_tokens=90, stop='", "age'),
        SamplingParams(structured_outputs=SPECS["endless"], seed=2, max_tokens=300),
    ]
    texts = prompts(3, 2)
    wanted = lettered_llm().generate(texts, how)
    for name in ("none", "eagle3"):
        given = in_rounds(name, monkeypatch).generate(texts, how)
        assert [seen(one) for one in given] == [seen(one) for one in wanted]
        assert given[1].outputs[0].stop_reason == '", "age'
