"""`auto` uses what a request brings: its grammar, and its prediction."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.drafters.test_conformance import prompts
from tests.grammars import PERSON, lettered_llm, started
from tests.laned import burst_on_cpu


@pytest.fixture(scope="module")
def llm() -> LLM:
    return lettered_llm("auto:clock=no")  # a pass of a tiny model is cheaper than any draft


def answer(llm: LLM, **settings: Any) -> Any:
    return llm.generate([[5, 6, 7]], SamplingParams(**{"seed": 4, "temperature": 0.7, "max_tokens": 90, **settings}))[0]


def used(output: Any) -> set[str]:
    return {drafter for made in output.stats.decisions for drafter in made.drafters}


def test_a_grammar_is_drafted_from(llm: LLM) -> None:
    how = {"structured_outputs": {"json": PERSON}}
    plain = answer(llm, speculate=False, **how)
    outputs = [answer(llm, **how) for _ in range(3)]
    assert all(output.token_ids == plain.token_ids for output in outputs)
    assert "grammar" in used(outputs[-1]) and outputs[-1].stats.tokens_per_step > 1.5
    assert "prediction" not in used(outputs[-1])


def test_what_is_certain_is_drafted_at_once() -> None:
    """Before anything is known of the grammar's drafts, and in the middle of a decision that holds for some steps."""
    output = answer(lettered_llm("auto:clock=no"), structured_outputs={"json": PERSON})
    constraint, origins = started({"json": PERSON}), output.stats.origins
    starts = [place + 1 for place, origin in enumerate(origins[:-1]) if origin is None]
    runs = {start: len(constraint.forced(output.token_ids[:start])) for start in starts}
    assert sum(count > 0 for count in runs.values()) > 2
    for start, count in runs.items():
        assert None not in origins[start : start + min(count, 16)]


def test_a_prediction_is_drafted_from(llm: LLM) -> None:
    plain = answer(llm, speculate=False)
    outputs = [answer(llm, prediction=plain.token_ids) for _ in range(3)]
    assert all(output.token_ids == plain.token_ids for output in outputs)
    assert "prediction" in used(outputs[-1]) and outputs[-1].stats.tokens_per_step > 2
    assert outputs[-1].stats.outcome_of("prediction")[0] > 30
    assert used(answer(llm)) <= {"suffix"}


def test_a_request_may_name_one_of_them(llm: LLM) -> None:
    how = {"structured_outputs": {"json": PERSON}, "speculate": "grammar"}
    assert used(answer(llm, **how)) <= {"grammar"}


def test_on_a_device_such_requests_go_by_the_host_and_the_others_stay_in_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = prompts(4, 2)
    plain = [lettered_llm().generate([prompt], SamplingParams(seed=1, max_tokens=40))[0] for prompt in asked]
    llm = burst_on_cpu(lettered_llm("auto"), monkeypatch)
    assert llm.burst is not None, "what a request may bring keeps no other out of rounds"
    by_host: set[Any] = set()
    launch = llm.engine.host.launch

    def launched(part: Any, plans: Any) -> None:
        by_host.update(item.sequence for item in part if item.sequence.first_token_at is not None)
        launch(part, plans)

    monkeypatch.setattr(llm.engine.host, "launch", launched)
    predictions = [None, plain[1].token_ids, None, None]
    how = [SamplingParams(seed=1, max_tokens=40, prediction=prediction) for prediction in predictions]
    assert [o.token_ids for o in llm.generate(asked, how)] == [o.token_ids for o in plain]
    assert {bool(sequence.request.prediction) for sequence in by_host} == {True}
