"""Plug-ins that hang, raise, return invalid trees or tamper lose their draft and nothing else."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, Plan, SamplingParams
from slipstream.drafters import DraftRequest
from slipstream.drafters.guard.isolation import Isolated, is_plug_in
from slipstream.drafters.guard.stopwatch import KEPT, SLOW_MS, SLOW_TIMES, WARM_UP, Stopwatch, slow
from slipstream.drafters.guard.views import SequenceView, Tokens
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.errors import DraftFault, OptionError
from slipstream.sequence import Request, Sequence
from slipstream.tree import Draw, TokenTree
from tests.drafters import plug_ins
from tests.drafters.plug_ins import NONSENSE, plug_in
from tests.tiny import plain_answers, tiny_llm

PROMPTS = [[7, 3, 5, 2] * 5, [1, 2, 3]]
HOW = SamplingParams(temperature=0.8, seed=4, max_tokens=24)


def plain(prompts: list[list[int]] = PROMPTS, how: SamplingParams = HOW) -> list[list[int]]:
    return [output.token_ids for output in plain_answers(prompts, how)]


def with_plug_in(kind: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    return tiny_llm(speculate=plug_in(kind, monkeypatch), **settings)


def isolated(llm: LLM) -> Isolated:
    drafter = llm.drafter
    assert isinstance(drafter, Isolated)
    return drafter


def patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a healthy plug-in keeps on the busiest machine."""
    monkeypatch.setattr(Isolated, "FIRST_SECONDS", 30.0)
    monkeypatch.setattr(Isolated, "SECONDS", 30.0)


def hastily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Isolated, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(Isolated, "SECONDS", 0.1)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-healthy"]


def ended(others: set[threading.Thread]) -> bool:
    """Whether all workers but these come to their end, which may take them a moment."""
    for _ in range(200):
        if not set(workers()) - others:
            return True
        time.sleep(0.05)
    return False


def faults(llm: LLM, prompts: list[list[int]] = PROMPTS, how: SamplingParams = HOW) -> list[int]:
    """The faults of each request, whose text is that of plain decoding."""
    outputs = llm.generate(prompts, how)
    assert [output.token_ids for output in outputs] == plain(prompts, how)
    return [output.stats.draft_faults for output in outputs]


# -- healthy ones -----------------------------------------------------------------------------------------------------


def test_only_what_has_nothing_of_ours_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plug_in(plug_ins.Healthy) and not is_plug_in(SuffixDrafter) and not is_plug_in(plug_ins.Derived)
    assert isinstance(with_plug_in(plug_ins.Derived, monkeypatch).drafter, plug_ins.Derived)


def test_a_healthy_plug_in_drafts_alone_and_merged_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    before = len(workers())
    llm = with_plug_in(plug_ins.Healthy, monkeypatch)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=40))
    assert output.stats.drafted > 0 and output.stats.draft_faults == 0
    assert faults(llm) == [0, 0] and len(workers()) == before + 1
    llm.use("suffix+theirs")
    assert faults(llm) == [0, 0]


def test_the_thread_ends_with_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    others = set(workers())
    llm = with_plug_in(plug_ins.Counting, monkeypatch)
    llm.generate(PROMPTS, HOW)
    assert len(set(workers()) - others) == 1
    llm.use(None)
    gc.collect()
    assert ended(others)


def test_a_plug_in_guesses_below_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    levels = [plug_in(plug_ins.Healthy, monkeypatch), {"method": "draft_model", "model": "tiny:0", "depth": 6}]
    assert faults(tiny_llm(speculate={"method": "cascade", "levels": levels})) == [0, 0]


def test_the_example_of_the_contributors_guide_works_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    module = types.ModuleType("slipstream_echo")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(guide.split("```python\n")[1].split("```")[0], vars(module))
    llm = with_plug_in(module.EchoDrafter, monkeypatch)
    assert isolated(llm).name == "echo" and faults(llm) == [0, 0]
    assert llm.generate(PROMPTS, HOW)[0].stats.drafted > 0


def test_numbers_of_numpy_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    assert faults(with_plug_in(plug_ins.NumpyTokens, monkeypatch)) == [0, 0]


def test_state_is_kept_with_the_sequence_and_outcomes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    llm = with_plug_in(plug_ins.Counting, monkeypatch)
    outputs = llm.generate(PROMPTS, HOW)
    inner: Any = isolated(llm)._inner
    assert sorted(inner.closed) == sorted(output.stats.drafting_steps for output in outputs)
    told = [token for outcome in inner.seen for token in outcome.tokens]
    assert 0 < len(told) < sum(len(output.token_ids) for output in outputs)
    assert all(type(outcome.sequence) is SequenceView for outcome in inner.seen)


# -- hanging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [plug_ins.Sleeping, plug_ins.Looping, plug_ins.HangingLater])
def test_one_that_hangs_is_abandoned_and_after_twice_no_longer_called(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain()
    hastily(monkeypatch)
    llm = with_plug_in(kind, monkeypatch)
    began = time.perf_counter()
    with caplog.at_level(logging.WARNING, "slipstream"):
        outputs = llm.generate(PROMPTS, HOW)
    assert time.perf_counter() - began < 25, "it was waited for"
    assert [output.token_ids for output in outputs] == expected
    assert [output.stats.draft_faults for output in outputs] == [1, 1]
    assert "did not return within 0.1 s" in caplog.text
    drafter = isolated(llm)
    assert drafter.gone and drafter._worker is None
    monkeypatch.setattr(drafter, "_ask", None)  # it is not called again
    assert [output.stats.draft_faults for output in llm.generate(PROMPTS, HOW)] == [1, 1]
    with pytest.raises(DraftFault, match="no longer called"):
        drafter.propose([])


def test_a_loop_in_python_ends_when_it_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    hastily(monkeypatch)
    others = set(workers())
    llm = with_plug_in(plug_ins.Looping, monkeypatch)
    llm.generate(PROMPTS, HOW)
    assert ended(others)


def test_after_one_hang_a_fresh_worker_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()
    llm = with_plug_in(plug_ins.Returning, monkeypatch)
    inner: Any = isolated(llm)._inner
    inner.answer = lambda requests: time.sleep(0.5)
    hastily(monkeypatch)
    assert [o.stats.draft_faults for o in llm.generate(PROMPTS[:1], HOW)] == [1]
    patiently(monkeypatch)
    inner.answer = lambda requests: plug_ins.Healthy.propose(inner, requests)
    outputs = llm.generate(PROMPTS, HOW)
    assert [o.stats.draft_faults for o in outputs] == [0, 0] and not isolated(llm).gone
    assert [o.token_ids for o in outputs] == expected


# -- raising and nonsense ---------------------------------------------------------------------------------------------


ERRORS: list[BaseException] = [ValueError("of many\nlines"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
ERRORS += [TimeoutError(), BaseException("base"), plug_ins.Speechless()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_is_a_fault_of_one_line(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    monkeypatch.setattr(plug_ins.Raising, "error", error)
    llm = with_plug_in(plug_ins.Raising, monkeypatch)
    assert faults(llm) == [1, 1]
    with pytest.raises(DraftFault, match=type(error).__name__) as raised:
        isolated(llm).propose([])
    assert "\n" not in str(raised.value) and not isolated(llm).gone


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_a_fault(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    monkeypatch.setattr(plug_ins.Returning, "answer", staticmethod(NONSENSE[kind]))
    assert faults(with_plug_in(plug_ins.Returning, monkeypatch)) == [1, 1]


@pytest.mark.parametrize("method", ["attach", "scratch_rows", "device_draft"])
def test_a_store_of_its_own_is_refused_when_it_is_made(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plug_ins.Returning, method, lambda self, thing: 0)
    with pytest.raises(OptionError, match=f"`{method}`"):
        with_plug_in(plug_ins.Returning, monkeypatch)


# -- meddling ---------------------------------------------------------------------------------------------------------


def test_what_it_is_handed_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    llm = with_plug_in(plug_ins.Meddling, monkeypatch)
    assert faults(llm) == [0, 0]
    inner: Any = isolated(llm)._inner
    assert inner.refused == 13


def test_a_tree_that_was_handed_in_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    drafter = isolated(with_plug_in(plug_ins.Returning, monkeypatch))
    inner: Any = drafter._inner
    sequence = Sequence(Request("r", None, [1, 2, 3], HOW, 5), 0, frozenset(), 100)
    even = torch.full((97,), 1 / 97)
    theirs = TokenTree(3)
    theirs.add(0, 5, origin="theirs", draw=Draw(even))
    theirs.add(0, 6, origin="theirs", draw=theirs.draws[1])
    inner.answer = lambda requests: [theirs]
    (ours,) = drafter.propose([DraftRequest(sequence, Plan(2, 4))])
    theirs._tokens[1] = 7
    theirs._child.clear()
    theirs.add(0, 8)
    even.zero_()
    ours.check(3, 97)
    assert ours.tokens == [3, 5, 6] and ours.origins == [None, "theirs", "theirs"] and ours.walk([6]) == [2]
    assert ours.draws[1] is ours.draws[2] is not None


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_trees_that_are_rewritten_after_they_were_handed_in_change_nothing(
    verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patiently(monkeypatch)
    expected = with_plug_in(plug_ins.Healthy, monkeypatch, verifier=verifier).generate(PROMPTS, HOW)
    outputs = with_plug_in(plug_ins.Holding, monkeypatch, verifier=verifier).generate(PROMPTS, HOW)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.stats.accepted for output in outputs] == [output.stats.accepted for output in expected]


def test_a_view_reads_like_the_list_it_was_made_of_and_does_not_grow() -> None:
    items = list(range(20))
    view = Tokens(items)
    items.extend([99, 98])
    kept = items[:20]
    assert len(view) == 20 and list(view) == kept and list(reversed(view)) == kept[::-1]
    assert view[0] == 0 and view[-1] == 19 and view.index(7) == 7 and 99 not in view
    for start in (None, -25, -3, 0, 4, 30):
        for stop in (None, -25, -3, 0, 4, 30):
            for step in (None, 1, 3, -1, -2):
                assert view[start:stop:step] == kept[start:stop:step]
    for place in (20, -21):
        with pytest.raises(IndexError):
            _ = view[place]


def test_a_view_of_a_sequence_tells_what_the_sequence_does() -> None:
    sequence = Sequence(Request("r", None, [1, 2, 3], SamplingParams(max_tokens=9), 5), 0, frozenset(), 100)
    sequence.tokens.extend([8, 9])
    sequence.output_ids.extend([8, 9])
    view = SequenceView.of(sequence, "theirs")
    assert (list(view.tokens), list(view.output_ids), list(view.prompt_ids)) == ([1, 2, 3, 8, 9], [8, 9], [1, 2, 3])
    assert (view.settled, view.remaining, view.params) == (sequence.settled, sequence.remaining, sequence.params)
    view.drafting["key"] = 1
    assert SequenceView.of(sequence, "theirs").drafting == {"key": 1}
    assert SequenceView.of(sequence, "others").drafting == {} and set(sequence.drafting) == {"theirs", "others"}


# -- drafters of ours, whose calls cannot be cut short ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call_ms", "usual_ms", "expected"),
    [
        (SLOW_MS + 1, 1.0, True),
        (SLOW_MS - 1, 1.0, False),  # fifty times its usual, and too short to notice
        (SLOW_MS + 1, SLOW_MS / 2, False),  # a slow drafter on a slow machine
        (SLOW_TIMES * 100 + 1, 100.0, True),
    ],
)
def test_a_call_is_slow_in_itself_and_against_its_like(call_ms: float, usual_ms: float, expected: bool) -> None:
    assert slow(call_ms, usual_ms) is expected


def test_first_calls_and_first_drafts_for_a_sequence_are_not_judged() -> None:
    watch = Stopwatch()
    assert not any(watch.took(60_000.0) for _ in range(1))  # compilation
    assert not any(watch.took(2.0) for _ in range(WARM_UP))
    assert not watch.took(60_000.0, fresh=True), "a long prompt was read"
    assert watch.took(60_000.0)
    for _ in range(KEPT):
        watch.took(59_000.0)
    assert not watch.took(60_000.0), "what is usual is what it has been lately"
