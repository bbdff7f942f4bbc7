"""What rounds on a GPU report: counts by depth, traced trees, times of CUDA events."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream import SamplingParams
from slipstream.policy.tally import ACCEPTED, BINS, OFFERED
from tests.device.on_gpu import DEVICE, Made
from tests.engine.test_rounds import TREES, asked
from tests.policy.test_reports import reports_of, totals

pytestmark = pytest.mark.gpu

NAMES = [*TREES, "suffix+eagle3"]
HOW = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
def test_reports_add_up(name: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made.rounds(name, TREES[name.rpartition("+")[2]], exact=True)
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
    assert sum(report.rows for report in reports) >= sum(output.stats.steps for output in outputs)
    assert sum(report.draft_ms for report in reports) > 0.0 < sum(report.verify_ms for report in reports)


@pytest.mark.parametrize("name", ["eagle3", "parallel", "medusa"])
def test_the_device_counts_what_the_host_counts(name: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both offer the same trees, but for the ends of answers."""
    counts = []
    for make in (made.host, made.rounds):
        llm = make(name, TREES[name], exact=True)
        reports = reports_of(llm, monkeypatch)
        llm.generate(asked(2, 60), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        counts.append(totals(reports).counts[name].sum((0, 1)))
    host, device = counts
    assert np.abs(host - device).max() <= 0.15 * host.max() + 12


@pytest.mark.parametrize("name", NAMES)
def test_a_traced_request_carries_the_trees_of_its_rounds(name: str, made: Made) -> None:
    llm = made.rounds(name, TREES[name.rpartition("+")[2]], exact=True)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    untraced = [token for delta in llm.stream(prompt, HOW) for token in delta.token_ids]
    said, root, trees = list[int](), prompt[-1], 0
    for delta in llm.stream(prompt, HOW, trace=True):
        given = list(delta.token_ids)
        for tree in delta.trees:
            trees += 1
            assert tree.tokens[0] == root
            assert all(0.0 <= sure <= 1.0 for sure in tree.confidence)
            assert {origin for origin in tree.origins if origin} <= llm.drafter.origins
            path = tree.walk(given)[: len(given) - 1] if tree is delta.trees[-1] else tree.walk(given)
            taken = given[: len(path) + 1]
            root, given = taken[-1], given[len(taken) :]
        assert not delta.trees or given == [], "every token comes from one of the trees"
        root = delta.token_ids[-1]
        said += delta.token_ids
    assert said == untraced and trees > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="times by CUDA events")
def test_the_times_of_a_burst_are_those_of_the_device(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are not longer than the whole, as the clock of the host sees it, and both are seen."""
    llm = made.rounds("eagle3", TREES["eagle3"])
    llm.generate(asked(2, 60), HOW)  # compiles and records
    reports = reports_of(llm, monkeypatch)
    stats = [output.stats for output in llm.generate(asked(2, 60), HOW)]
    whole = sum(one.prefill_ms + one.decode_ms for one in stats)
    parts = sum(report.draft_ms + report.verify_ms for report in reports)
    assert 0.0 < parts <= 1.05 * whole
    assert 0.0 < sum(report.draft_ms for report in reports) < parts
