"""`auto` in rounds: it changes shapes and pauses, and no token changes; a drafter that was paused misses nothing.

Here on a CPU: the same code as on a GPU, called instead of captured.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.drafters.device.tree_loop import TreeLoop
from slipstream.engine.host import HostRunner
from slipstream.gpu.graphs import sizes
from slipstream.policy.burst_planner import BurstPlanner
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan
from tests.engine.test_come_and_go import arriving
from tests.engine.test_ordinary_rounds import ENGINE, seen
from tests.engine.test_rounds import HEADS, TREES, asked
from tests.heads import random_head
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import plain_answers, tiny_llm

LOOP = [3, 1, 4, 1, 5, 9, 2, 6] * 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


def auto_llm(*names: str, **options: Any) -> LLM:
    """`auto` with these drafters; heads are random ones."""
    llm = tiny_llm(context=300, characters=True)
    parts: list[Any] = []
    for name in names:
        method, settings = HEADS.get(name, (name, {}))
        learned = name in TREES or name in HEADS or name == "kangaroo"
        head = {"checkpoint": str(random_head(method, **settings)), **TREES.get(method, {})} if learned else {}
        parts.append({"method": method, **head})
    llm.use({"method": "auto", "drafters": parts, **options})
    return llm


def planner_of(llm: LLM) -> BurstPlanner:
    planner = llm.engine.policy.rounds
    assert planner is not None
    return planner


def in_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch, rounds: int = 3) -> set[tuple[Plan, ...]]:
    """Bursts of all shapes in turn, started ahead every other time; returns the kinds that ran."""
    burst, turn, ran = burst_of(llm), itertools.count(), set[tuple[Plan, ...]]()

    def next_shape(name: str, sequences: list[Sequence]) -> Plan:
        kinds, number = [Plan(), *burst.shapes(len(sequences))], next(turn)
        return replace(kinds[number // 2 % len(kinds)], rounds=rounds, ahead=number % 3 != 0)

    monkeypatch.setattr(planner_of(llm), "burst", next_shape)
    verify = burst._verify

    def noted(buffers: Any, *args: Any) -> None:
        ran.add(buffers.kind or ())
        verify(buffers, *args)

    monkeypatch.setattr(burst, "_verify", noted)
    return ran


@pytest.mark.parametrize("names", [("suffix", "eagle3"), ("suffix", "medusa"), ("suffix", "draft_model"), ("suffix",)])
def test_no_token_changes_while_shapes_change_and_requests_come_and_go(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, how = arriving(20)
    llm = burst_on_cpu(auto_llm(*names), monkeypatch)
    llm.engine.scheduler.max_sequences = 6
    ran = in_turn(llm, monkeypatch)
    given = llm.generate(prompts, how)
    assert [seen(one) for one in given] == [seen(one) for one in plain_answers(prompts, how, **ENGINE)]
    assert ran >= {(), *(plan.parts for plan in burst_of(llm).shapes(1))}
    assert len(ran) >= len(names) * 2
    assert llm.engine.draft_faults == 0 and llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("names", [("suffix", "eagle3"), ("suffix", "kangaroo"), ("suffix", "parallel", "early_exit")])
def test_no_token_changes_if_the_policy_is_free(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, how = arriving(20)
    llm = burst_on_cpu(auto_llm(*names), monkeypatch)
    llm.engine.scheduler.max_sequences = 6
    given = llm.generate(prompts, how)
    assert [seen(one) for one in given] == [seen(one) for one in plain_answers(prompts, how, **ENGINE)]
    assert llm.burst is not None and llm.engine.draft_faults == 0
    assert llm.cache.available == llm.cache.capacity
    for prompt, output in zip(prompts, given, strict=True):
        decisions, emitted = output.stats.decisions, output.stats.emitted
        # The first token comes from the prompt, unless that is a single one, which is a step like all others.
        assert sum(made.tokens for made in decisions) == emitted - (len(prompt) > 1)
        assert all(made.reason for made in decisions)


def trees_of(llm: LLM, prompt: list[int], how: SamplingParams) -> tuple[list[int], dict[int, TokenTree]]:
    """The answer, and the trees by the number of tokens before their roots."""
    said: list[int] = []
    trees: dict[int, TokenTree] = {}
    for delta in llm.stream(prompt, how, trace=True):
        given = list(delta.token_ids)
        for tree in delta.trees:
            trees[len(said)] = tree
            taken = given[: len(tree.walk(given)) + 1]
            said, given = said + taken, given[len(taken) :]
        said += given
    return said, trees


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("beside", [(), ("suffix",)])
@pytest.mark.parametrize("name", [*TREES, "medusa before"])
def test_a_drafter_that_was_paused_drafts_as_if_it_had_not_been(
    name: str, beside: tuple[str, ...], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounds keep what it reads of the target, and so do rounds in which another drafts."""
    how = SamplingParams(temperature=0.9, seed=3, max_tokens=120, ignore_eos=True)
    prompt = asked(1)[0][:60]
    told = []
    for pause in (range(0), range(20, 70)):
        llm = burst_on_cpu(auto_llm(*beside, name), monkeypatch)
        shapes = burst_of(llm).shapes(1)

        def planned(_: str, sequences: list[Sequence], pause: range = pause, shapes: list[Plan] = shapes) -> Plan:
            here = len(sequences[0].output_ids)
            resting = shapes[-1] if beside and here > 40 else Plan()  # the chains of `suffix` alone
            return replace(resting if here in pause else shapes[0], rounds=4, ahead=ahead)

        monkeypatch.setattr(planner_of(llm), "burst", planned)
        told.append(trees_of(llm, prompt, how))
        assert llm.engine.draft_faults == 0
    (said, always), (again, paused) = told
    assert again == said
    assert len([place for place in paused if place < 64 and len(paused[place]) > 20]) < len(always) / 3, "no pause"
    both = [place for place in always if place > 80 and place in paused]
    assert len(both) >= 15
    for place in both:
        assert (paused[place].tokens, paused[place].parents) == (always[place].tokens, always[place].parents)


def test_pages_that_plain_rounds_filled_have_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request begins with an answer of plain rounds, and the head drafts from there as it always does."""
    llm = burst_on_cpu(auto_llm("eagle3"), monkeypatch)
    (largest, *_), planner = burst_of(llm).shapes(1), planner_of(llm)
    monkeypatch.setattr(planner, "burst", lambda *_: Plan(rounds=4, ahead=True))
    prompt, how = asked(1)[0][:100], SamplingParams(temperature=0.7, seed=3, max_tokens=100)
    told = [*prompt, *llm.generate([prompt], how)[0].token_ids, 1, 2, 3]
    table = llm.cache.open(told, llm.drafter.stores_needed)
    assert len(table.pages) >= (len(told) - 4) // PAGE_SIZE
    llm.cache.release(table)
    monkeypatch.setattr(planner, "burst", lambda *_: replace(largest, rounds=4))
    again = llm.generate([told], how)[0]
    fresh_llm = burst_on_cpu(auto_llm("eagle3"), monkeypatch)
    monkeypatch.setattr(planner_of(fresh_llm), "burst", lambda *_: replace(largest, rounds=4))
    fresh = fresh_llm.generate([told], how)[0]
    assert (again.token_ids, again.stats.origins) == (fresh.token_ids, fresh.stats.origins)


def test_no_draft_means_that_nothing_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(auto_llm("suffix", "eagle3"), monkeypatch)
    monkeypatch.setattr(planner_of(llm), "burst", lambda *_: Plan(rounds=4, ahead=True))
    monkeypatch.setattr(TreeLoop, "begin", lambda self: pytest.fail("a draft"))
    output = llm.generate([LOOP], GREEDY)[0]
    assert output.stats.drafted == 0 and llm.engine.draft_faults == 0


def test_a_kind_of_rounds_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(auto_llm("suffix", "eagle3"), monkeypatch)

    def broken(self: TreeLoop, sampled: bool) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(TreeLoop, "grow", broken)
    ran = in_turn(llm, monkeypatch)
    given = llm.generate(asked(), GREEDY)
    wanted = plain_answers(asked(), GREEDY, context=300, characters=True)
    assert [one.token_ids for one in given] == [one.token_ids for one in wanted]
    assert llm.burst is not None
    assert [sum(own.drafts for own in plan.parts) for plan in burst_of(llm).shapes(5)] == [1], "the chains are left"
    assert len(ran) == 2 and llm.engine.draft_faults == 4


def rounds_and_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who ran, for sequences that decode."""
    ran, launch = list[str](), burst_of(llm).launch
    step = HostRunner.launch

    def burst(*args: Any) -> Any:
        ran.append("rounds")
        return launch(*args)

    def host(self: HostRunner, part: Any, plans: Any) -> None:
        ran.extend("host" for item in part if item.sequence.first_token_at is not None)
        step(self, part, plans)

    monkeypatch.setattr(burst_of(llm), "launch", burst)
    monkeypatch.setattr(HostRunner, "launch", host)
    return ran


LIMITS = {"auto:max_nodes=7": (7, 7), "auto:max_nodes=15,max_depth=7,objective=throughput,max_tpot_ms=500": (15, 7)}


@pytest.mark.parametrize(
    ("own", "by"),
    [
        (None, "rounds"),
        ("auto:max_nodes=7", "rounds"),
        ("auto:max_nodes=15,max_depth=7,objective=throughput,max_tpot_ms=500", "rounds"),
        ("suffix", "rounds"),
        ("auto:max_nodes=2,max_depth=2", "host"),  # no shape is that small
        ("auto:max_nodes=0", "host"),
        ("eagle3", "host"),  # no shape is without chains
        ("auto:clock=no", "host"),
    ],
)
def test_limits_of_a_request_are_kept_in_rounds_or_by_the_host(
    own: str | None, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = burst_on_cpu(auto_llm("suffix", "eagle3"), monkeypatch)
    ran = rounds_and_steps(llm, monkeypatch)
    how = replace(GREEDY, speculate=own)
    _, trees = trees_of(llm, LOOP, how)
    assert set(ran) == {by}
    if by == "rounds":
        nodes, depth = LIMITS.get(own or "", (40, 16))
        assert all(len(tree) - 1 <= nodes and max(tree.depths) <= depth for tree in trees.values())
    if own in ("suffix", "eagle3"):
        assert {origin for tree in trees.values() for origin in tree.origins if origin} <= {own}


def test_a_batch_keeps_the_limits_of_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(auto_llm("suffix", "eagle3"), monkeypatch)
    drafter, shapes = llm.drafter, burst_of(llm).shapes(2)
    assert len({plan.nodes for plan in shapes}) >= 3
    how = [replace(GREEDY, speculate=own) for own in ("auto:max_nodes=7", "auto:max_nodes=30")]
    outputs = llm.generate([LOOP, LOOP[::-1]], how)
    assert drafter.limits.nodes == 64
    for output in outputs:
        assert max(made.nodes // made.steps for made in output.stats.decisions) <= 7


def test_after_a_warm_up_no_request_meets_a_new_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, how = arriving(24)
    llm = burst_on_cpu(auto_llm("suffix", "eagle3"), monkeypatch)
    llm.engine.scheduler.max_sequences = 5
    device = llm.engine.device
    assert device is not None
    device.warm_up()
    count, burst = device.graphs, burst_of(llm)
    trees = sum(len(burst.shapes(size)) for size in sizes(5))
    # A round of every level, and drafts with and without noise; `none` is there beside any other drafter.
    assert count == (2 * len(sizes(5)) + trees) * 4 + 2 * trees
    in_turn(llm, monkeypatch)
    given = llm.generate(prompts, how)
    assert [seen(one) for one in given] == [seen(one) for one in plain_answers(prompts, how, **ENGINE)]
    assert device.graphs == count, "a request met a shape that is not warm"


def test_catching_up_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(auto_llm("eagle3"), monkeypatch)
    largest = burst_of(llm).shapes(1)[0]
    calls, observe = list[Any](), llm.engine.policy.observe

    def noted(report: Any) -> None:
        calls.extend(report.calls)
        observe(report)

    monkeypatch.setattr(llm.engine.policy, "observe", noted)

    def planned(_: str, sequences: list[Sequence]) -> Plan:
        return replace(Plan() if len(sequences[0].output_ids) in range(20, 70) else largest, rounds=4, ahead=True)

    monkeypatch.setattr(planner_of(llm), "burst", planned)
    llm.generate([[5, 6, 7]], GREEDY)
    late = [call for call in calls if call.drafter == "auto" and call.read > 20]
    assert len(late) == 1 and late[0].ms > 0.0
    forecast = planner_of(llm).forecast
    assert forecast.drafts.catch_up("eagle3", 50, -1.0) > 0.0


def test_features_are_those_of_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain rounds, of rounds with trees and of chains, one after the other."""
    rows = []
    for bursts in (False, True):
        llm = auto_llm("suffix", "eagle3")
        if bursts:
            in_turn(burst_on_cpu(llm, monkeypatch), monkeypatch)
        (sequence,) = llm.sequences(LOOP, GREEDY)
        llm.engine.scheduler.add([sequence])
        while len(sequence.output_ids) < 60:
            llm.engine.step()
        key = next(key for key in llm.cache.stores if key.endswith("features"))
        data = llm.cache.stores[key][0, 0, sequence.table.pages, 0].flatten(0, 1)
        rows.append(data[: len(LOOP) + 50].clone())
        llm.engine.cancel(sequence)
    assert torch.allclose(rows[0], rows[1], atol=1e-4)
