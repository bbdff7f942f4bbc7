"""Traces, tables of costs, and what `simulate` makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated_rounds import compared
from slipstream import LLM, SamplingParams
from slipstream.bench.cost_table import CostTable, costs_of, load_costs, shipped
from slipstream.bench.machine_costs import drafts_of, measure_costs, paced
from slipstream.bench.measure import Run
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.real_steps import RealStep, real_steps
from slipstream.bench.replay import Decoded, Recorded, play
from slipstream.bench.schedule import Condition
from slipstream.bench.simulate import SIZES, Scenario, best, outlook
from slipstream.bench.traces import Step, TracedAnswer, Traces, load, save, steps_of
from slipstream.engine import Engine
from slipstream.errors import SlipstreamError
from tests.invoking import invoke

#     0 -- 1 -- 3 -- 5        accepted: 1 3
#     |    `--- 4
#     `--- 2
TREE = Step(50, (0, 0, 1, 1, 3), (0.9, 0.05, 0.8, 0.1, 0.6), (1, 3), 3)
PLAIN_STEP = Step(50, (), (), (), 1)


def linear(per_row: float = 0.0, *, flat: float = 10.0, draft: float = 2.0, context: float = 0.0) -> CostTable:
    """A pass costs `flat` and a little per row; a draft the same at any size."""
    points = [
        (rows, sequences, length, flat + per_row * rows + context * sequences * length)
        for rows in (1, 2, 8, 64) for sequences in (1, 8) for length in (100, 1000) if rows >= sequences
    ]  # fmt: skip
    return CostTable(points, {"tree": [(5, 1, draft), (5, 8, draft)]}, [], "a table")


def traces(*steps: Step, count: int = 20) -> Traces:
    first = Step(40, (), (), (), 1)
    drafted = TracedAnswer("tree", "a", "p", 40, (first, *steps * count))
    length = sum(step.tokens for step in drafted.steps)
    return Traces({}, [TracedAnswer("none", "a", "p", 40, (PLAIN_STEP,) * length), drafted])


@pytest.mark.parametrize(
    ("nodes", "expected"), [(None, (5, 3)), (9, (5, 3)), (3, (3, 3)), (2, (2, 3)), (1, (1, 2)), (0, (0, 1))]
)
def test_a_smaller_tree_keeps_its_most_confident_nodes(nodes: int | None, expected: tuple[int, int]) -> None:
    assert TREE.cut(nodes) == expected


def test_a_node_is_never_kept_without_its_parent() -> None:
    odd = Step(0, (0, 1, 0), (0.1, 0.5, 0.3), (1, 2), 3)  # a drafter whose confidence grows along a path
    assert odd.cut(1) == (1, 1) and odd.cut(2)[0] <= 2


def test_steps_of_a_real_answer_add_up(tiny: str) -> None:
    llm = LLM(tiny, speculate="suffix")
    how = SamplingParams(temperature=0.0, max_tokens=40)
    deltas = list(llm.stream("The quick brown fox. The quick", how, trace=True))
    completion = deltas[-1].completion
    assert completion is not None
    prompt = llm.get_tokenizer().encode("The quick brown fox. The quick")
    steps = list(steps_of(deltas, len(prompt)))
    stats = completion.stats
    assert len(steps) == stats.steps and sum(step.tokens for step in steps) == stats.emitted
    assert sum(len(step.parents) for step in steps) == stats.drafted
    assert sum(min(len(step.accepted), step.tokens) for step in steps) >= stats.accepted
    assert [step.context for step in steps[1:]] == [s.context + s.tokens for s in steps[:-1]]


def test_traces_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written = traces(TREE, PLAIN_STEP)
    save(written, path)
    assert load(path).answers == written.answers and load(path).settings == ["none", "tree"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no traces of `slipstream bench --trace`"),
        ("nonsense", "line 1 is not a trace"),
        ('{"format": "slipstream-trace", "version": 1}\n{"steps": [[1]]}', "line 2 is not a trace"),
        ('{"format": "slipstream-trace", "version": 1}', "has no traces"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(SlipstreamError, match=message):
        load(path)


def test_where_rows_are_free_the_speedup_is_that_of_the_arithmetic() -> None:
    """Passes of 10 ms whatever their rows, drafts of 2: three tokens in 12 ms instead of 30, but for the prompt."""
    plain, drafted = outlook(traces(TREE, count=2000), linear(), Scenario())
    assert plain.tokens_per_second == pytest.approx(100, rel=0.01)
    assert drafted.step_ms == pytest.approx(12.0) and drafted.tokens_per_step == pytest.approx(3.0)
    assert drafted.speedup == pytest.approx(2.5, rel=0.01)


def test_where_rows_are_dear_small_trees_win_and_then_none() -> None:
    recorded = traces(TREE, PLAIN_STEP, count=200)

    def winner(per_row: float, draft: float = 0.1) -> Any:
        return best(outlook(recorded, linear(per_row, draft=draft), Scenario(), sizes=(1, 2, 4)))

    assert winner(0.01).nodes in (None, 2)
    assert winner(2.0).nodes in (1, 2)
    assert winner(2.0, draft=50.0).setting == "none"


def test_places_are_filled_as_answers_end() -> None:
    """Two places, three answers; a pass takes 10 ms and 1 more per row. The third prompt is read while the second
    answer decodes: passes take 12, 12, 12, 21, 12, 12 and 11 ms.
    """
    step = Decoded(50, 0, 1)
    answers = [Recorded(1, [step] * 2), Recorded(1, [step] * 6), Recorded(10, [step] * 2)]
    played = play(answers, 2, linear(1.0), "none", 0.0)
    assert played.tokens == 3 + 7 + 3
    assert played.e2e_ms == pytest.approx(36 + 92 + (81 - 36))
    assert (played.full_tokens, played.full_ms) == (6, pytest.approx(36.0))
    assert (played.decoded, played.decoding_ms, played.ms) == (8, pytest.approx(48.0), pytest.approx(92.0))
    drafting = Recorded(1, [Decoded(50, 1, 1), step])  # a draft for 2 ms and a row more, and a step without
    alone = play([drafting], 1, linear(1.0, draft=2.0), "tree", 1.0)
    assert alone.e2e_ms == pytest.approx(11.0 + 14.0 + 11.0)


def test_a_large_batch_has_steps_although_somebody_always_reads() -> None:
    """64 prompts of 400 tokens for answers of a few steps: in no step do all decode. 384 rows are more than 64."""
    recorded, table = traces(TREE._replace(context=450), count=4), linear(0.5)
    long = Traces({}, [replace(answer, prompt_tokens=400) for answer in recorded.answers])
    table = replace(table, pass_ms=[*table.pass_ms, (64, 64, 1000, 42.0)])
    plain, drafted = outlook(long, table, Scenario(64))
    assert plain.step_ms == pytest.approx(10 + 64 * 0.5, rel=0.01) and plain.covered
    assert drafted.step_ms == pytest.approx(10 + 64 * 6 * 0.5 + table.a_draft("tree", 5, 64), rel=0.01)
    assert not drafted.covered


def test_a_long_context_of_many_is_beyond_what_was_measured_for_one() -> None:
    table = CostTable([(1, 1, 32_000, 5.4), (64, 64, 256, 5.2)])
    assert table.covers(1, 1, 32_000) and table.covers(64, 64, 400)
    assert not table.covers(64, 64, 4096)


def test_places_of_a_device_are_filled_after_a_burst() -> None:
    """Rounds of 10 ms; plain bursts have 16 of them, those with trees 8. Sixteen answers, one of which ends early."""
    table = replace(linear(draft=0.0), rounds=True)
    early, late = Recorded(1, [Decoded(50, 5, 1)] * 3), Recorded(1, [Decoded(50, 5, 1)] * 8)
    played = play([early, *[late] * 15], 16, table, "tree", 5.0)
    assert played.ms == pytest.approx(10 + 80) and (played.decoded, played.decoding_ms) == (123, pytest.approx(80))
    assert played.e2e_ms == pytest.approx(16 * 90)  # the early one is seen to have ended after the burst
    # Two of sixteen end the burst. One answer waits, and gets one of their places: its prompt is read beside a burst
    # of two rounds.
    played = play([early, early, *[late] * 14, Recorded(1, [Decoded(50, 5, 1)])], 16, table, "tree", 5.0)
    assert played.ms == pytest.approx(10 + 30 + (10 + 20) + 30)
    alone = Recorded(1, [Decoded(50, 0, 1)] * 20)
    assert play([alone], 1, table, "none", 0.0).ms == pytest.approx(10 + 200)


def test_answers_are_asked_when_an_eighth_of_the_places_is_free() -> None:
    """Of 16 places one is free after the first step, and stays free until another is."""
    short, middle, long = (Recorded(1, [Decoded(50, 0, 1)] * steps) for steps in (1, 3, 4))
    played = play([short, middle, *[long] * 14, short], 16, linear(), "none", 0.0)
    assert played.tokens == 2 + 4 + 14 * 5 + 2
    assert played.ms == pytest.approx(10 + 30 + 10 + 10)  # the last prompt is read while the others end


def test_a_row_of_a_prompt_may_be_cheaper() -> None:
    prompt = Recorded(64, [])
    full, half = (play([prompt], 1, replace(linear(1.0), prompt_row=part), "none", 0.0).ms for part in (1.0, 0.5))
    assert (full, half) == (pytest.approx(74.0), pytest.approx(42.0))


def test_the_policy_is_played_with_the_trees_that_pay() -> None:
    recorded = traces(TREE, PLAIN_STEP, count=200)
    as_policy = Traces({}, [replace(a, setting=a.setting.replace("tree", "auto")) for a in recorded.answers])
    for per_row, draft in ((0.01, 0.1), (2.0, 0.1), (2.0, 50.0)):
        table = linear(per_row, draft=draft)
        table.draft_ms["auto"] = table.draft_ms["tree"]
        expected = best(outlook(recorded, table, Scenario(4), sizes=SIZES)).tokens_per_second
        *_, found = outlook(as_policy, table, Scenario(4))
        assert (found.setting, found.tokens_per_second) == ("auto", pytest.approx(expected))


def test_the_policy_has_the_costs_of_the_drafters_that_it_took() -> None:
    """A table of another machine knows drafters, and not what a policy took."""
    table = linear(0.01, draft=2.0)
    table.draft_ms = {"a": [(5, 1, 2.0)], "a+b": [(5, 1, 4.0)], "a+b+c": [(5, 1, 9.0)]}
    assert [table.drafting("auto", names) for names in ((), ["a"], ["a", "b"], ["b"])] == ["auto", "a", "a+b", "a+b"]
    recorded = traces(TREE, count=200)
    used = [replace(a, setting=a.setting.replace("tree", "auto"), drafters=("b",)) for a in recorded.answers]
    auto = outlook(Traces({}, used), table, Scenario())[1]
    assert auto.setting == "auto" and auto.step_ms == pytest.approx(10.0 + 0.06 + 4.0, rel=0.01)
    with pytest.raises(SlipstreamError, match="does not have auto"):  # traces that do not say what it took
        outlook(Traces({}, [replace(each, drafters=()) for each in used]), table, Scenario())
    with pytest.raises(SlipstreamError, match="does not have d"):
        outlook(Traces({}, [replace(each, drafters=("d",)) for each in used]), table, Scenario())


def test_a_step_without_a_draft_pays_for_none() -> None:
    table = linear(draft=4.0)
    some, all_of_them = (
        outlook(traces(*steps, count=500), table, Scenario())[1] for steps in ((TREE, PLAIN_STEP), (TREE,))
    )
    assert all_of_them.step_ms == pytest.approx(14.0) and some.step_ms == pytest.approx(12.0, rel=0.01)


def test_a_group_is_what_a_bench_asks_together() -> None:
    """With its last answers places stay empty: each answer is done sooner, and the rate while all are full is more."""
    recorded, table = traces(TREE, count=50), linear(0.5)
    steady, grouped = (outlook(recorded, table, Scenario(8, group=group))[1] for group in (None, 16))
    assert steady.tokens_per_second == pytest.approx(grouped.tokens_per_second, rel=0.1)
    assert steady.step_ms == pytest.approx(grouped.step_ms, rel=0.05)


def test_a_larger_batch_pays_for_its_rows() -> None:
    recorded, table = traces(TREE, count=200), linear(0.5)
    alone, eight = (outlook(recorded, table, Scenario(batch))[1] for batch in (1, 8))
    assert eight.tokens_per_second > alone.tokens_per_second and eight.speedup < alone.speedup
    assert alone.covered and eight.covered and not outlook(recorded, table, Scenario(64))[1].covered


def test_a_longer_context_costs_what_the_table_says() -> None:
    recorded, table = traces(TREE, count=200), linear(context=0.01)
    assert table.a_pass(1, 1, 500) == pytest.approx(15.0, rel=1e-3)
    short, long = (outlook(recorded, table, Scenario(1, context))[0] for context in (100, 1000))
    assert (short.step_ms, long.step_ms) == (pytest.approx(11.0, rel=1e-3), pytest.approx(20.0, rel=1e-3))


def test_the_fit_finds_what_made_the_points() -> None:
    """A staircase over rows, K/V to read, attention of rows, and noise of 2%."""
    import numpy as np

    rng = np.random.default_rng(0)

    def true(rows: int, sequences: int, context: int) -> float:
        return 4.0 + (rows > 16) + 0.02 * rows + 4e-4 * sequences * context + 2e-5 * rows * context

    shapes = [(r, s, c) for r in (1, 4, 16, 32, 64) for s in (1, 4, 16) for c in (128, 1024, 4096) if r >= s]
    table = CostTable([(*shape, true(*shape) * (1 + 0.02 * rng.standard_normal())) for shape in shapes])
    for shape in ((8, 2, 600), (48, 8, 2000), (64, 16, 4096), (1, 1, 128)):
        assert table.a_pass(*shape) == pytest.approx(true(*shape), rel=0.06), shape


def test_the_table_of_an_h200_gives_its_own_points() -> None:
    assert shipped() == ["h200-8b"]
    table = load_costs("h200-8b")
    assert "H200" in table.machine and "benchmarks.gpu" in table.command
    for rows, sequences, context, ms in table.pass_ms:
        assert table.a_pass(rows, sequences, context) == pytest.approx(ms, rel=0.06), (rows, sequences)
    assert costs_of(table.as_dict()).pass_ms == table.pass_ms


def test_an_unknown_drafter_or_a_wrong_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="does not have nonsense"):
        linear().a_draft("nonsense", 5, 1)
    assert linear().a_draft("tree:nodes=4", 5, 1) == 2.0
    for data in ({}, {"format": "slipstream-costs", "version": 1, "pass_ms": [[1]]}):
        with pytest.raises(SlipstreamError):
            costs_of(data)
    with pytest.raises(SlipstreamError, match="cannot be read"):
        load_costs(str(tmp_path / "nowhere.json"))


def test_the_verbs_work_together(tiny: str, tmp_path: Path) -> None:
    """A bench writes traces and costs, which are replayed for this machine and for another."""
    file, trace = tmp_path / "mine.jsonl", tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"The quick {n}", "category": "c"}) for n in range(4)))
    line = ["bench", "-m", tiny, "--prompts", str(file), "--tokens", "16", "--minutes", "0.15", "-o", str(tmp_path)]
    done = invoke(*line, "--speculate", "suffix", "--trace", str(trace))
    assert done.exit_code == 0, done.output
    recorded = load(trace)
    assert recorded.settings == ["none", "suffix"] and len(recorded.answers) == 8
    assert len(recorded.header["costs"]["pass_ms"]) > 8 and recorded.header["costs"]["draft_ms"]["suffix"]
    replayed = invoke("simulate", str(trace), "--batch", "1,8", "--price", "2/h")
    assert replayed.exit_code == 0, replayed.output
    assert "per 1M tokens" in replayed.output and "the best of all settings" in replayed.output
    found = json.loads(invoke("simulate", str(trace), "--batch", "1,8", "--context", "300", "--json").output)
    assert [each["batch"] for each in found["scenarios"]] == [1, 8]
    elsewhere = invoke("simulate", str(trace), "--costs", "h200-8b", "--batch", "1,64", "--json")
    assert elsewhere.exit_code == 0, elsewhere.output
    steps = [row["step_ms"] for each in json.loads(elsewhere.output)["scenarios"] for row in each["settings"]]
    assert min(steps) > 4.0  # of an 8B model
    itself = invoke("simulate", str(trace), "--costs", str(trace), "--json")
    assert (
        json.loads(itself.output)["scenarios"]
        == json.loads(invoke("simulate", str(trace), "--json").output)["scenarios"]
    )
    assert invoke("simulate", str(tmp_path / "nowhere")).exit_code == 2


def test_passes_take_what_they_take_in_real_steps() -> None:
    """In real steps a row takes 1.1 of what it does alone, a tree of 16 rows 1.5; four sequences twice as much."""
    table, true = linear(0.5), {1: 1.1, 16: 1.5}

    def step(setting: str, sequences: int, nodes: int, draft: float, by: float) -> RealStep:
        rows = sequences * (1 + nodes)
        ms = by * table.a_pass(rows, sequences, 266) + draft
        return RealStep(setting, sequences, 0, rows, 266, sequences * (nodes > 0), draft, ms)

    steps = [step("none", 1, 0, 0.0, true[1]), step("tree", 1, 15, 2.0, true[16])] * 5
    found = paced(table, steps)
    assert found.a_pass(1, 1, 266) == pytest.approx(1.1 * table.a_pass(1, 1, 266), rel=0.02)
    assert found.a_pass(8, 1, 266) == pytest.approx(1.4 * table.a_pass(8, 1, 266), rel=0.02)
    assert drafts_of(steps) == {"tree": [(15, 1, 2.0)]}
    rare = replace(traces(TREE).answers[1], setting="rare", draft_ms=0.7)  # it has drafted in answers only
    assert drafts_of(steps, [rare])["rare"] == [(5, 1, 0.7)] and "none" not in drafts_of(steps, traces(TREE).answers)
    both = paced(table, steps + [step("none", 8, 0, 0.0, 2.0)] * 5)
    alike, more = (next(ms for *at, ms in each.pass_ms if at == [8, 8, 1000]) for each in (found, both))
    assert more == pytest.approx(2.0 * table.a_pass(8, 8, 1000), rel=0.01) and alike < more
    prompts = [RealStep("none", 1, 255, 256, 0, 0, 0.0, 0.8 * found.a_pass(256, 1, 128))] * 3
    assert paced(table, [*steps, *prompts]).prompt_row == pytest.approx(0.8, rel=0.01)
    assert paced(table, steps[:1]) is table  # a single step says nothing


def test_what_is_done_for_each_sequence_is_found() -> None:
    shapes = [(r, s, c) for r in (1, 4, 16, 64) for s in (1, 4, 16) for c in (128, 1024) if r >= s]
    table = CostTable([(r, s, c, 5 + 0.2 * r + 0.7 * s + 1e-3 * s * c) for r, s, c in shapes])
    assert table.a_pass(64, 8, 500) == pytest.approx(5 + 12.8 + 5.6 + 4.0, rel=0.01)


def test_real_steps_are_those_of_the_engine(tiny: str) -> None:
    llm = LLM(tiny, drafters=["none", "suffix"])
    prompts = [BenchPrompt(str(n), "c", text=f"One two one two {n} one two one") for n in range(4)]
    run = Run(llm, prompts, ["none", "suffix"], [Condition(1), Condition(4)], 16, traces=[])
    steps = real_steps(run, 0.0)
    assert {(step.setting, step.sequences) for step in steps} >= {(s, n) for s in ("none", "suffix") for n in (1, 4)}
    assert all(step.rows >= step.sequences and step.ms > step.draft_ms >= 0 for step in steps)
    assert {step.drafting for step in steps if step.setting == "none"} == {0}
    assert any(step.drafting and step.rows > step.sequences for step in steps if step.setting == "suffix")
    assert llm.engine.emit == Engine.emit.__get__(llm.engine)  # nothing watches any more
    costs = measure_costs(run, 0.1)
    assert costs.pass_ms and costs.draft_ms["suffix"] and costs_of(costs.as_dict()) == costs


def test_figures_of_a_gpu_are_compared_with_what_is_simulated() -> None:
    """Passes of 10 ms and drafts of 2, whatever their rows: three tokens in 12 ms instead of 30, in every run."""
    measured: dict[str, Any] = {
        "answers": {"over_plain": {"tree": 2.5, "other": 9.0}},
        "batches": {"tokens": 128, "batch": [1, 8], "nodes": [5, 5], "over_plain": {"tree": [2.5, 5.0]}},
        "served": {"requests": [8], "at_once": [1], "nodes": [5], "none": [100], "tok_s": {"tree": [250]}},
    }
    answers = [replace(each, setting="tree:nodes=5") for each in traces(TREE, count=40).answers[1:]]
    rows = list(compared(measured, answers, replace(linear(), rounds=True)))
    assert [row.run for row in rows] == ["answers one by one", "1 together", "8 together", "8, 1 at a time"]
    assert [row.measured for row in rows] == [2.5, 2.5, 5.0, 2.5]
    assert all(row.simulated == pytest.approx(2.5, rel=0.05) for row in rows)
    assert rows[2].error == pytest.approx(-0.5, rel=0.05)


def test_the_measured_figures_are_those_of_the_document() -> None:
    root = Path(__file__).parents[2]
    measured = json.loads((root / "benchmarks" / "h200.json").read_text())
    page = (root / "docs" / "benchmarks.md").read_text()
    for figures in (*measured["batches"]["over_plain"].values(), measured["answers"]["over_plain"].values()):
        assert all(f"{figure:.2f} |" in page for figure in figures)
    speeds = measured["served"]["none"], *measured["served"]["tok_s"].values()
    assert all(f"{figure:,}" in page for each in speeds for figure in each)
    costs = load_costs("h200-8b")
    assert set(measured["answers"]["over_plain"]) == set(costs.draft_ms) and costs.rounds
