"""Requests that come and go: lanes are refilled one by one, sizes change seldom, and a warm-up has met every shape."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.extras import Level
from slipstream.engine.lane_map import LaneMap, LanePosition
from slipstream.gpu.graphs import bucket, sizes
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence
from tests.engine.test_ordinary_rounds import ENGINE, MIXED, drafting, seen
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import plain_answers


def arriving(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds and lengths."""
    chooser, prompts, how = random.Random(count), [], []
    for number in range(count):
        prompts.append([chooser.randrange(97) for _ in range(chooser.randrange(1, 40))])
        kind = {"seed": number, "max_tokens": chooser.randrange(8, 60), "ignore_eos": True}
        how.append(SamplingParams(**{**kind, **MIXED[number % len(MIXED)]}))
    return prompts, how


def limited(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> LLM:
    llm = burst_on_cpu(drafting(name), monkeypatch)
    llm.engine.scheduler.max_sequences = most
    return llm


@pytest.mark.parametrize("name", ["none", "eagle3", "suffix", "suffix+eagle3", "medusa"])
def test_each_request_is_laid_out_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the few times that the size of the batch changes: nothing is done anew for those that stay."""
    prompts, how = arriving(40)
    llm = limited(name, 6, monkeypatch)
    fill, laid, made = Lanes.fill, list[tuple[int, Sequence]](), set[int]()

    def counted(self: Lanes, sequences: Mapping[int, Sequence | None], *args: Any) -> None:
        laid.extend((self.size, sequence) for sequence in sequences.values() if sequence is not None)
        made.add(self.size)
        fill(self, sequences, *args)

    monkeypatch.setattr(Lanes, "fill", counted)
    given = llm.generate(prompts, how)
    assert [seen(one) for one in given] == [seen(one) for one in plain_answers(prompts, how, **ENGINE)]
    assert made <= set(sizes(6))
    if name != "suffix":  # it goes from plain rounds to chains and back, each time in other buffers
        assert len(laid) <= len(prompts) + 12
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


@pytest.mark.parametrize("name", ["none", "eagle3", "suffix"])
def test_after_a_warm_up_no_request_meets_a_new_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, how = arriving(24)
    llm = limited(name, 5, monkeypatch)
    device, burst = llm.engine.device, burst_of(llm)
    assert device is not None
    device.warm_up()
    count = device.graphs
    # For each size: a round of every level; drafts with and without noise. `none` is there beside any other drafter.
    plain, drafting_ = len(sizes(5)) * len(Level), len(sizes(5)) * (len(Level) + 2)
    assert count == {"none": plain, "eagle3": plain + drafting_, "suffix": 2 * plain + drafting_}[name]
    tallied = [tally.counts for tally in (counter.since() for counter in burst._counters.values())]
    assert all(not part.any() for counts in tallied for part in counts.values()), "idle lanes count nothing"
    given = llm.generate(prompts, how)
    assert [seen(one) for one in given] == [seen(one) for one in plain_answers(prompts, how, **ENGINE)]
    assert device.graphs == count, "a request met a shape that is not warm"
    assert llm.cache.available == llm.cache.capacity


def test_a_warm_up_leaves_running_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = limited("none", 4, monkeypatch)
    device = llm.engine.device
    assert device is not None
    (sequence,) = llm.sequences([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    llm.engine.scheduler.add([sequence])
    for _ in range(3):
        llm.engine.step()
    before = device.graphs
    device.warm_up()
    assert device.graphs == before
    while not llm.engine.scheduler.idle:
        llm.engine.step()
    wanted = plain_answers([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), **ENGINE)
    assert sequence.output_ids == wanted[0].token_ids


def positions(llm: LLM, count: int) -> list[LanePosition]:
    how = SamplingParams(max_tokens=4)
    return [LanePosition(llm.sequences([1, 2], how)[0], 1, 2, 1) for _ in range(count)]


def test_lanes_are_kept_vacated_and_taken() -> None:
    llm = drafting("none")
    a, b, c, d = positions(llm, 4)
    lane_map = LaneMap(4)
    assert lane_map.take([a, b, c]) == ([0, 1, 2], {0: a.sequence, 1: b.sequence, 2: c.sequence})
    lane_map.leave([0, 1, 2], [a, b, c])
    assert lane_map.take([c, a]) == ([2, 0], {1: None}), "b has left: its lane is emptied"
    lane_map.leave([2, 0], [c, a])
    assert lane_map.take([c, d, a]) == ([2, 1, 0], {1: d.sequence}), "d takes the free lane"
    lane_map.leave([2, 1, 0], [c, d._replace(tokens=9), a])
    assert lane_map.take([a, d]) == ([0, 1], {2: None, 1: d.sequence}), "d is not where its lane is"
    assert lane_map.take([a, d]) == ([0, 1], {0: a.sequence, 1: d.sequence}), "a burst that failed is not relied on"


def test_a_batch_shrinks_after_some_patience_and_grows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    burst = burst_of(limited("none", 64, monkeypatch))
    burst._sizes[False] = 16, 0
    assert [burst._lanes_for(count, False) for count in (17, 16, 12, 9, 8, 7, 1)] == [24, 16, 16, 16, 16, 16, 1]
    burst._sizes[False] = 16, 4
    assert [burst._lanes_for(count, False) for count in (16, 12, 5)] == [16, 12, bucket(5)]
