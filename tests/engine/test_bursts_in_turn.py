"""Consecutive bursts: what continues, what ends, and what is left over."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.drafters.heads.sequential import FeatureLoop
from slipstream.engine.launched import Launched
from slipstream.errors import EngineFailed
from slipstream.gpu.lanes import Lanes
from tests.engine.test_rounds import TREES, asked, drafting_llm
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import plain_answers, tiny_draft, tiny_llm

SMALL: dict[str, Any] = {"depth": 3, "nodes": 7, "branch": 3}  # for long texts


def told_in_bursts(name: str, go_on: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int, int]:
    """What five sequences in six lanes say; how often lanes were laid out for it, and in how many bursts."""
    llm = burst_on_cpu(drafting_llm(name, SMALL), monkeypatch, ahead=False)
    burst = burst_of(llm)
    fill, settle, laid, bursts = Lanes.fill, burst.settle, 0, 0

    def counted_fill(self: Lanes, *args: Any) -> None:
        nonlocal laid
        laid += 1
        fill(self, *args)

    def counted_settle(launched: Launched, *args: Any) -> None:
        nonlocal bursts
        bursts += 1
        settle(launched, *args)
        lanes, sequences = launched.buffers.lanes, launched.sequences
        idle = lanes.slots[sorted(set(range(lanes.size)).difference(launched.lanes))]
        assert (idle <= launched.buffers.rounds * (1 + lanes.depth)).all(), "lanes without a sequence run out of pages"
        for lane, sequence in zip(launched.lanes, sequences, strict=True):
            if not sequence.finished:
                assert lanes.slots[lane] == sequence.cached == len(sequence.tokens) - 1
                assert lanes.tokens[lane, 0] == sequence.tokens[-1]
        if not go_on:
            launched.buffers.lane_map.forget()

    with monkeypatch.context() as patched:
        patched.setattr(Lanes, "fill", counted_fill)
        patched.setattr(burst, "settle", counted_settle)
        how = [SamplingParams(temperature=0.7, seed=i, max_tokens=100, ignore_eos=True) for i in range(5)]
        outputs = llm.generate(asked(longest=100), how)
    return [(o.token_ids, o.stats.origins) for o in outputs], laid, bursts


@pytest.mark.parametrize("name", ["eagle3", "suffix+eagle3", "parallel", "medusa", "draft_model", "mtp"])
def test_sequences_that_go_on_are_not_laid_out_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, laid, bursts = told_in_bursts(name, True, monkeypatch)
    again, laid_again, bursts_again = told_in_bursts(name, False, monkeypatch)
    assert told == again
    assert laid_again == bursts_again == bursts > 5
    assert laid <= bursts // 2


def mixed(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of many kinds, some of which repeat themselves, end early, or must go by the host."""
    chooser = random.Random(seed)
    requests = []
    for number in range(7):
        length = chooser.randrange(1, 130)
        motif = [chooser.randrange(6, 97) for _ in range(chooser.randrange(2, 8))]
        text = [chooser.randrange(97) for _ in range(length)]
        how: dict[str, Any] = {"temperature": chooser.choice([0.0, 0.7]), "n": chooser.choice([1, 1, 2])}
        if chooser.random() < 0.15:
            how["logprobs"] = 1
        params = SamplingParams(seed=number, max_tokens=chooser.randrange(1, 120), **how)
        requests.append(((motif * 65)[:length] if chooser.random() < 0.5 else text, params))
    return requests


@pytest.mark.parametrize("name", ["suffix", "none", "suffix+eagle3"])
@pytest.mark.parametrize("seed", range(2))
def test_arrivals_departures_and_preemptions_change_no_text(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continuing from the last burst gives the same text as laying everything out again."""
    said = []
    for go_on, ahead in ((True, True), (True, False), (False, False)):
        engine = {"eos": 5, "cache_tokens": 8 * PAGE_SIZE}
        llm = tiny_llm(context=300, characters=True, **engine)
        if name != "none":
            llm = drafting_llm(name, SMALL, **engine) if "+" in name else llm
        if "+" not in name:
            llm.use(None if name == "none" else name)
        burst = burst_of(burst_on_cpu(llm, monkeypatch, ahead=ahead))
        settle = burst.settle

        def settled(launched: Launched, *args: Any, settle: Any = settle, go_on: bool = go_on) -> None:
            settle(launched, *args)
            if not go_on:
                launched.buffers.lane_map.forget()

        monkeypatch.setattr(burst, "settle", settled)
        outputs = dict(llm.answers(mixed(seed), 4))
        # Who is in a batch depends on the clock, and with it what `suffix` alone is trusted with: not what is said.
        said.append({n: [(c.token_ids, c.finish_reason) for c in o.outputs] for n, o in outputs.items()})
        assert llm.engine.draft_faults == 0
        assert llm.cache.available == llm.cache.capacity
    assert said[0] == said[1] == said[2]


def test_no_round_is_wasted_where_the_length_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(context=300, characters=True)
    llm.use(tiny_draft({"method": "draft_model", "model": "tiny:0", "depth": 3}))  # the target itself: always right
    burst = burst_of(burst_on_cpu(llm, monkeypatch))
    verify, rounds = burst.verify, 0

    def counted(*args: Any) -> None:
        nonlocal rounds
        rounds += 1
        verify(*args)

    monkeypatch.setattr(burst, "verify", counted)
    for tokens in (9, 22, 43):
        rounds = 0
        output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))[0]
        assert len(output.token_ids) == tokens
        assert rounds == output.stats.steps - 1, "the first step is the prompt's"


def test_a_drafter_knows_its_text_up_to_the_root_of_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows after that root are where the nodes of a tree are, not where the text continues."""
    llm = tiny_llm(context=300, characters=True)
    llm.use(tiny_draft({"method": "draft_model", "model": "tiny:0", "depth": 3}))  # the target itself: always right
    burst = burst_of(burst_on_cpu(llm, monkeypatch, ahead=False))
    settle, unknown = burst.settle, list[int]()

    def noted(launched: Launched, *args: Any) -> None:
        settle(launched, *args)
        going = [s for s in launched.sequences if not s.finished]
        unknown.extend(s.cached - s.table.lengths[llm.drafter.key] for s in going)

    monkeypatch.setattr(burst, "settle", noted)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True))
    assert len(unknown) >= 3 and set(unknown) == {3}


def test_a_drafter_that_cannot_settle_is_dropped_and_no_token_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    how = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    plain = plain_answers(asked(3), how, context=300, characters=True)
    llm = burst_on_cpu(drafting_llm("eagle3", TREES["eagle3"]), monkeypatch)

    def broken(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(FeatureLoop, "settle", broken)
    outputs = llm.generate(asked(3), how)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.stats.draft_faults for o in outputs] == [1, 1, 1]


def test_an_interrupt_while_the_last_round_runs_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(drafting_llm("eagle3", TREES["eagle3"]), monkeypatch)
    burst = burst_of(llm)
    commit = burst.commit

    def interrupted(launched: Launched, *args: Any) -> None:
        commit(launched, *args)
        if any(s.finished for s in launched.sequences):
            raise KeyboardInterrupt

    monkeypatch.setattr(burst, "commit", interrupted)
    how = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 60)]
    with pytest.raises(EngineFailed, match="KeyboardInterrupt"):  # no client was interrupted, the engine was
        llm.generate(asked(2), how)
    assert llm.engine.scheduler.idle
    assert llm.cache.available == llm.cache.capacity
    monkeypatch.undo()
    assert llm.generate(asked(2), how)[1].finish_reason == "length", "the next requests are served"


def test_a_round_that_was_begun_after_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, how = [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm = tiny_llm(context=300, characters=True, speculate=None)
    said = llm.generate([prompt], how)[0].token_ids
    place, stop = next((i, token) for i, token in enumerate(said) if i >= 5 and token not in said[:i])
    burst = burst_of(burst_on_cpu(llm, monkeypatch))
    read, waited = burst.read, list[tuple[int, int]]()

    def noted(launched: Launched, first: int, stop: int) -> None:
        waited.append((stop, launched.rounds))
        read(launched, first, stop)

    monkeypatch.setattr(burst, "read", noted)
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[stop]))[0]
    assert output.finish_reason == "stop" and len(output.token_ids) == place + 1
    assert waited and all(stop < rounds for stop, rounds in waited[-1:])
