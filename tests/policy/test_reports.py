"""What runners report: the same of the host's steps and of rounds on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams, attention
from slipstream.gpu import forest
from slipstream.models.decoder import Decoder
from slipstream.policy import Report, Tally
from slipstream.policy.tally import ACCEPTED, BINS, OFFERED
from slipstream.tree import TokenTree
from tests.engine.test_rounds import TREES, asked, drafting_llm
from tests.laned import burst_on_cpu, over_tiles

pytestmark = pytest.mark.slow

NAMES = [*TREES, "suffix+eagle3"]
HOW = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def reports_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """The reports that the policy gets."""
    seen: list[Report] = []
    monkeypatch.setattr(llm.engine.policy, "observe", seen.append)
    return seen


def drafting(name: str, bursts: bool, monkeypatch: pytest.MonkeyPatch) -> LLM:
    llm = drafting_llm(name, TREES[name.rpartition("+")[2]])
    return burst_on_cpu(llm, monkeypatch) if bursts else llm


def totals(reports: list[Report]) -> Tally:
    tally = Tally()
    for report in reports:
        tally.add(report.tally)
    return tally


@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_reports_add_up(name: str, bursts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(name, bursts, monkeypatch)
    reports = reports_of(llm, monkeypatch)
    outputs = llm.generate(asked(3, 60), HOW)
    tally = totals(reports)
    assert set(tally.counts) <= llm.drafter.origins
    for origin in llm.drafter.origins:
        accepted = sum(output.stats.origins.count(origin) for output in outputs)
        counts = tally.counts.get(origin, np.zeros((1, BINS, 2), dtype=np.int64))
        assert (counts[..., OFFERED] >= counts[..., ACCEPTED]).all()
        # What was accepted after the last token of an answer is counted here, and not there.
        assert accepted <= counts[..., ACCEPTED].sum() <= accepted + 3 * 16
    assert all(report.draft_ms >= 0.0 and report.verify_ms >= 0.0 for report in reports)
    rows, steps = sum(report.rows for report in reports), sum(output.stats.steps for output in outputs)
    assert rows >= steps
    for kind in ("draft_ms", "verify_ms"):
        told, charged = (sum(getattr(item, kind) for item in items) for items in (reports, [o.stats for o in outputs]))
        assert told > 0.0 and 0.5 * told <= charged <= 1.01 * told, kind


@pytest.mark.parametrize("name", TREES)
def test_a_device_counts_what_the_host_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both offer the same trees: all but the ends of answers."""
    told = []
    for bursts in (False, True):
        llm = drafting(name, bursts, monkeypatch)
        reports = reports_of(llm, monkeypatch)
        llm.generate(asked(2, 60), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        told.append(totals(reports).counts[name])
    host, device = (counts.sum((0, 1)) for counts in told)
    assert np.abs(host - device).max() <= 0.15 * host.max() + 12
    first = [counts[0].sum(0)[ACCEPTED] for counts in told]
    assert abs(first[0] - first[1]) <= 0.15 * max(first) + 3


@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("name", ["suffix", "medusa static", *NAMES])
def test_a_traced_request_carries_its_trees(name: str, bursts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "suffix":
        from tests.tiny import tiny_llm

        llm = tiny_llm(context=300, characters=True, speculate="suffix")
        llm = burst_on_cpu(llm, monkeypatch) if bursts else llm
    elif name == "medusa static":
        llm = drafting_llm("medusa", {"depth": 3, "nodes": 20, "tree": "static"})
        llm = burst_on_cpu(llm, monkeypatch) if bursts else llm
    else:
        llm = drafting(name, bursts, monkeypatch)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    plain = list(llm.stream(prompt, HOW))
    assert not any(delta.trees for delta in plain), "trees come to who asks for them"
    said, root, accepted, origins = list[int](), prompt[-1], 0, list[str | None]()
    for delta in llm.stream(prompt, HOW, trace=True):
        given = list(delta.token_ids)
        for tree in delta.trees:
            assert tree.tokens[0] == root
            assert all(0.0 <= sure <= 1.0 for sure in tree.confidence)
            path = tree.walk(given)[: len(given) - 1] if tree is delta.trees[-1] else tree.walk(given)
            taken = given[: len(path) + 1]
            accepted += len(path)
            origins += [tree.origins[node] for node in path] + [None]
            root, given = taken[-1], given[len(taken) :]
        if delta.trees:
            assert given == [], "every token comes from one of the trees"
        else:  # rounds without a tree
            root = delta.token_ids[-1]
            origins += [None] * len(delta.token_ids)
        said += delta.token_ids
        last = delta
    assert last.completion is not None
    stats = last.completion.stats
    assert said == [token for delta in plain for token in delta.token_ids]
    assert abs(accepted - stats.accepted) <= 1 and len(origins) == len(stats.origins)
    assert sum(a != b for a, b in zip(origins, stats.origins, strict=True)) <= 1


def test_rounds_tell_which_drafter_made_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """`suffix` beside a head: both are named, and what a tree guessed as well is the head's."""
    llm = drafting("suffix+eagle3", True, monkeypatch)
    output = llm.generate([[3, 1, 4, 1, 5, 9, 2, 6] * 12], SamplingParams(temperature=0.0, max_tokens=150))[0]
    assert {"suffix", "eagle3", None} == set(output.stats.origins)


def random_forest(generator: torch.Generator, lanes: int, nodes: int) -> tuple[torch.Tensor, ...]:
    parents = torch.zeros(lanes, nodes, dtype=torch.int64)
    scores = torch.zeros(lanes, nodes)
    depths = torch.zeros(lanes, nodes, dtype=torch.int64)
    for lane in range(lanes):
        for node in range(1, nodes):
            parent = int(torch.randint(0, node, (1,), generator=generator))
            parents[lane, node] = parent
            depths[lane, node] = depths[lane, parent] + 1
            scores[lane, node] = scores[lane, parent] + torch.rand(1, generator=generator)[0].log()
    return parents, depths, scores


def test_counts_of_a_forest_are_those_of_its_trees() -> None:
    generator = torch.Generator().manual_seed(3)
    lanes, nodes = 5, 12
    parents, depths, scores = random_forest(generator, lanes, nodes)
    levels = int(depths.max())
    origins = torch.randint(0, 2, (lanes, nodes), generator=generator)
    path = torch.zeros(lanes, levels, dtype=torch.int64)
    tally = Tally()
    for lane in range(lanes):
        node, tree, places = 0, TokenTree(0), [0]
        for child in range(1, nodes):
            joint = float(scores[lane, child].exp())
            origin = str(int(origins[lane, child]))
            places.append(tree.add(places[parents[lane, child]], child, origin=origin, confidence=joint))
        taken = []
        for level in range(levels):
            children = [n for n in range(1, nodes) if parents[lane, n] == node]
            if not children or (lane == 1 and level == 1):
                break
            node = children[-1]
            path[lane, level] = node
            taken.append(node)
        if lane != 4:
            tally.add_tree(tree, taken)
    counts = torch.zeros(2, levels, BINS, 2, dtype=torch.int64)
    active = torch.tensor([1, 1, 1, 1, 0])  # the last lane is idle
    for _ in range(2):  # counts only grow
        forest.count(counts, parents, origins, depths, scores, path, active)
    for origin in range(2):
        wanted = np.zeros((levels, BINS, 2), dtype=np.int64)
        found: Any = tally.counts[str(origin)]
        wanted[: len(found)] = found
        assert np.array_equal(counts[origin].numpy(), 2 * wanted)


def test_a_burst_that_ends_early_is_reported_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end is seen one round late, and the last round is not waited for: the others took time all the same."""
    llm = drafting("eagle3", True, monkeypatch)
    prompt = asked(1, 60)[0]
    said = llm.generate([prompt], HOW)[0].token_ids
    place, stop = next((i, token) for i, token in enumerate(said) if i >= 12 and token not in said[:i])
    reports = reports_of(llm, monkeypatch)
    how = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=[stop])
    (output,) = llm.generate([prompt], how)
    assert len(output.token_ids) == place + 1
    stats = output.stats
    assert stats.draft_ms + stats.verify_ms + stats.other_ms > 0.6 * stats.decode_ms
    assert sum(report.rows for report in reports) >= (stats.steps - 1) * 41


@pytest.mark.parametrize("place", ["signal", "device_draft"])
def test_a_drafter_that_fails_while_the_policy_plans_ends_no_request(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny import tiny_llm

    llm = tiny_llm(context=300, characters=True, speculate="suffix")
    monkeypatch.setattr(attention, "over_tiles", over_tiles)
    monkeypatch.setattr(Decoder, "captures", True)
    llm.engine.set_runners()
    prompts = asked(3, 60)
    healthy = getattr(llm.drafter, place)

    def broken(what: Any) -> Any:
        if place == "device_draft" or list(what.request.prompt_ids) == prompts[1]:
            raise RuntimeError("no")
        return healthy(what)

    monkeypatch.setattr(llm.drafter, place, broken)
    outputs = llm.generate(prompts, HOW)
    wanted = tiny_llm(context=300, characters=True, speculate=None).generate(prompts, HOW)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    assert [output.stats.draft_faults for output in outputs] == ([0, 1, 0] if place == "signal" else [0, 0, 0])
    assert llm.engine.draft_faults == 1
