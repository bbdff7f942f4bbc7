"""The policy over a real engine: it changes no token, draws no more than allowed, and gives reasons."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.drafters import Drafter, DraftOptions
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.composites.auto import available
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import own
from slipstream.drafters.registry import DrafterSpec
from slipstream.engine import core
from slipstream.errors import NotEnoughMemory, SlipstreamError
from slipstream.policy import saved as saving
from slipstream.policy.record import Context, Record
from slipstream.policy.saved import SavedPolicy
from slipstream.tree import TokenTree
from tests.heads import random_head
from tests.tiny import tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = [5, 6, 7, 8] * 12


def answer(llm: LLM, **changes: Any) -> Any:
    return llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **changes))[0]


@pytest.fixture
def llm() -> LLM:
    return tiny_llm(context=300, speculate="auto")


def test_it_is_the_default_and_has_the_available_drafters(llm: LLM) -> None:
    assert llm.drafter.name == "auto"
    assert list(llm.drafter.parts) == ["suffix", "grammar", "prediction"], "nothing was trained for a tiny model"


def test_every_step_has_a_decision_with_a_reason(llm: LLM) -> None:
    output = answer(llm)
    decisions = output.stats.decisions
    assert sum(made.tokens for made in decisions) == output.stats.emitted - 1, "the first token comes from the prompt"
    assert all(made.reason for made in decisions)
    assert {made.drafters for made in decisions} <= {(), ("suffix",)}
    measured = [made.probe and not made.drafters for made in decisions]
    assert measured[:3] == [True, True, False], "the first two steps measure plain decoding"


def test_limits_of_a_request_are_kept(llm: LLM) -> None:
    expected = answer(llm, speculate=False).token_ids
    for _ in range(3):
        few = answer(llm, speculate="auto:max_nodes=2,max_depth=1")
        assert few.token_ids == expected
        assert max(made.nodes for made in few.stats.decisions) <= 2
        assert len(few.stats.accepted_by_depth) <= 1
        assert answer(llm, speculate="auto:max_nodes=0").stats.drafted == 0
        assert answer(llm, speculate="suffix").token_ids == expected
        assert answer(llm, speculate="auto:drafters=suffix+grammar,max_nodes=2").token_ids == expected
        assert answer(llm, speculate="auto:drafters=grammar").stats.drafted == 0, "there is no grammar"
    with pytest.raises(SlipstreamError, match="unknown loaded drafter 'eagle3'"):
        answer(llm, speculate="auto:drafters=suffix+eagle3")


def test_with_the_clock_off_a_request_is_decided_in_the_same_way_again(llm: LLM) -> None:
    once, again = ([made[:4] for made in answer(llm, speculate="auto:clock=no").stats.decisions] for _ in range(2))
    assert once == again
    assert any(made[0] for made in once), "and it drafts"


@pytest.mark.real_model
def test_drafts_that_pay_are_used() -> None:
    with LLM() as llm:
        question = [{"role": "user", "content": "Write a Python class for a bank account."}]
        for speculate in (False, None, None):
            how = SamplingParams(temperature=0.0, max_tokens=60, speculate=speculate)
            output = llm.chat(question, how)[0]
        assert list(llm.drafter.parts) == ["suffix", "grammar", "prediction", "eagle3"]
        assert output.stats.tokens_per_step > 1.3


class Bad(Drafter[DraftOptions]):
    """The base of the planted ones."""

    name = "bad"
    summary = helps = cost = "a planted fault"
    options_type = DraftOptions
    calls = 0

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        type(self).calls += 1
        return [self.tree(request) for request in requests]

    def tree(self, request: DraftRequest) -> TokenTree:
        raise NotImplementedError


class Wrong(Bad):
    """Always sure, always wrong: the tiny model never says token 0."""

    def tree(self, request: DraftRequest) -> TokenTree:
        return TokenTree.chain(request.sequence.tokens[-1], [0] * 6, origin="bad")


class Raises(Bad):
    def tree(self, request: DraftRequest) -> TokenTree:
        raise RuntimeError("planted")


class NotANumber(Bad):
    def tree(self, request: DraftRequest) -> TokenTree:
        tree = TokenTree(request.sequence.tokens[-1])
        tree.add(0, 1, confidence=float("nan"))
        return tree


class Sleeps(Bad):
    def tree(self, request: DraftRequest) -> TokenTree:
        time.sleep(0.05)
        return TokenTree.chain(request.sequence.tokens[-1], [0], origin="bad")


def planted(kind: type[Bad]) -> LLM:
    kind.calls = 0
    llm = tiny_llm(context=300, speculate=None)

    class Spec(DrafterSpec):
        def build(self, target: Any) -> Any:
            return kind(DraftOptions(), target)

        def checked(self) -> DraftOptions:
            return DraftOptions()

    llm.use(DrafterSpec("auto", {"drafters": (DrafterSpec("suffix"), Spec("bad"))}))
    return llm


@pytest.mark.parametrize("kind", [Wrong, Raises, NotANumber, Sleeps])
def test_a_bad_drafter_changes_no_token_and_is_soon_left_alone(kind: type[Bad]) -> None:
    llm = planted(kind)
    expected = answer(llm, speculate=False).token_ids
    requests = 30
    for _ in range(requests):
        assert answer(llm).token_ids == expected
    steps = requests * 59
    if kind in (Raises, NotANumber):
        assert kind.calls <= requests, "dropped for a request after one call"
        assert llm.engine.draft_faults <= requests
    else:
        assert 0 < kind.calls < steps / 20
    if kind is Sleeps:
        assert kind.calls <= 4, "a call costs more than 100 steps"


def test_what_was_learnt_is_kept_between_runs(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "directory", lambda: tmp_path / "policy")
    answer(llm)
    policy = llm.engine.policy
    saved = SavedPolicy(policy, "some-model", ("int8", "cpu", 2))
    saved.save()
    assert not list(tmp_path.rglob("*.json")), "too little to be worth it"
    monkeypatch.setattr(saving, "_WORTH_SAVING_MS", 1.0)
    monkeypatch.setattr(policy, "decoded_ms", 2.0)
    saved.save()
    (path,) = tmp_path.rglob("*.json")
    other = tiny_llm(context=300, speculate="auto").engine.policy
    SavedPolicy(other, "some-model", ("int8", "cpu", 2)).restore()
    assert other.state() == json.loads(json.dumps(policy.state()))
    path.write_text('{"format": 1, "worth": 3}')
    SavedPolicy(other, "some-model", ("int8", "cpu", 2)).restore()
    assert "is ignored" in caplog.text


def test_a_head_that_would_take_room_from_requests_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = random_head("eagle3")
    monkeypatch.setattr(head_checkpoint, "find", lambda name, _: head if name == "eagle3" else None)
    with tiny_llm(context=300, characters=True, device="cpu", speculate="auto", cache_tokens=640) as llm:
        assert list(llm.drafter.parts) == ["suffix", "grammar", "prediction", "eagle3"]
        page = PAGE_SIZE * llm.model.config.kv_bytes_per_token(llm.model.dtype.itemsize)
    monkeypatch.setattr(core, "kv_bytes", lambda *_: (640 // PAGE_SIZE) * page)  # for K/V of the target alone
    with tiny_llm(context=300, characters=True, device="cpu", speculate="auto", cache_tokens=640) as llm:
        assert list(llm.drafter.parts) == ["suffix", "grammar", "prediction"]
        assert "without a trained head" in caplog.text
        assert len(answer(llm).token_ids) == 60
    with pytest.raises(NotEnoughMemory):
        tiny_llm(context=300, characters=True, device="cpu", speculate=f"eagle3:checkpoint={head}", cache_tokens=640)


def test_a_wrong_limit_is_refused(llm: LLM) -> None:
    for wrong in ("auto:objective=fame", "auto:max_nodes=900", "auto:nodes=3", "auto:max_tpot_ms=-1"):
        with pytest.raises(SlipstreamError):
            answer(llm, speculate=wrong)


def test_what_ships_has_the_worth_of_the_shipped_drafters_and_no_costs() -> None:
    state = json.loads((saving.SHIPPED / "2ccae5729066b2e7.json").read_bytes())
    assert set(state) == {"format", "worth", "record"}
    assert {f"{origin}|{number}" for origin in ("suffix", "eagle3") for number in (0, 1, 2)} <= set(state["worth"])
    policy = tiny_llm(context=300, speculate="auto").engine.policy
    SavedPolicy(policy, "2ccae5729066b2e7", ("never measured",)).restore()
    assert policy.worth.state() == state["worth"]
    short, long = (policy.record.mean(("suffix",), Context(match, 0, 0), model=False)[0] for match in (1, 5))
    assert short < 0.5 < 3.0 < long
    greedy, sampled = (policy.record.mean(("eagle3",), Context(0, number, 0), model=True)[0] for number in (0, 2))
    assert sampled < greedy


def test_one_bad_step_does_not_rule_a_way_out() -> None:
    record, context = Record(), Context(4, 0, 3)
    guess, _ = record.mean(("suffix",), context, model=False)
    record.add(("suffix",), context, 0, 8)
    assert record.mean(("suffix",), context, model=False)[0] == pytest.approx(0.75 * guess)
    for _ in range(60):
        record.add(("suffix",), context, 0, 8)
    assert record.mean(("suffix",), context, model=False)[0] < guess / 10


def test_a_draft_model_that_is_named_may_draft_deep_trees_on_a_cpu(llm: LLM) -> None:
    named = available(llm.target, "some-model")[-1].checked()
    fixed = DrafterSpec("draft_model", {"model": "some-model"})
    assert named.plan.depth > fixed.checked().plan.depth and named.plan.branch > 1


def test_shipped_drafters_are_found_for_the_built_in_model() -> None:
    assert own("eagle3", "2ccae5729066b2e7").is_dir()
