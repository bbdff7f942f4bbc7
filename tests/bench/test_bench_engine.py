"""The bench on a tiny model: what is measured, how often, and what the figures are made of."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from slipstream.bench import condition_table
from slipstream.bench.compare import compare_results
from slipstream.bench.condition_table import ConditionTable, Grouping
from slipstream.bench.figures import figures
from slipstream.bench.intervals import Interval
from slipstream.bench.measure import Answer, Run, check_settings
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import Condition, Schedule, conditions, stratified
from slipstream.bench.session import results, run_bench
from slipstream.bench.verdicts import verdict
from slipstream.errors import OptionError, PromptError
from slipstream.types import Stats
from tests.invoking import invoke

PROMPTS = [
    BenchPrompt(f"{kind}/{number}", kind, ({"role": "user", "content": f"{text} {number}"},))
    for kind, text in (("fox", "The quick brown fox"), ("code", "def add(a, b): return"), ("dog", "lazy dog over"))
    for number in range(3)
]


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, speculate=None, drafters=["suffix", "ngram", "suffix:nodes=4", "ngram:nodes=4"])


def run_of(llm: LLM, prompts: list[BenchPrompt] = PROMPTS, asked: list[Condition] | None = None) -> Run:
    return Run(llm, prompts, check_settings(["suffix", "ngram"]), asked or conditions(), tokens=24)


def measured(run: Run, seconds: float = 60.0, *, rounds: int = 1, plain_every: int = 1) -> dict[str, Any]:
    """Results after so many rounds over all prompts."""
    order = [run.fitting[place] for place in stratified([run.prompts[index] for index in run.fitting])]
    schedule = Schedule(order, run.conditions, run.settings, time.monotonic() + seconds, repeats=rounds > 1)
    schedule.plain_every[0] = plain_every

    def after(turn: Any) -> None:
        for number, condition in enumerate(run.conditions):
            wanted = rounds * -(-len(order) // condition.group)
            schedule.tight[number] = len({(a.group, a.round) for a in run.answers if a.condition == number}) >= wanted

    run.measure(schedule, after)
    return results(run, {})


def test_every_prompt_is_answered_with_every_setting_and_the_first_takes_turns(llm: LLM) -> None:
    run = run_of(llm)
    measured(run)
    assert Counter(answer.setting for answer in run.answers) == dict.fromkeys(run.settings, len(PROMPTS))
    firsts = [answer.setting for answer in run.answers[::3]]
    assert Counter(firsts) == dict.fromkeys(run.settings, 3)
    texts = defaultdict(set)
    for answer in run.answers:
        texts[answer.prompt].add(answer.token_ids)
    assert all(len(same) == 1 for same in texts.values())


def test_figures_are_whole_where_plain_decoding_was_asked_less(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later turns of conversations too, which see the answers of the first setting."""
    monkeypatch.setattr(condition_table, "loop_start", lambda ids: None)  # a tiny random model loops everywhere
    prompts = [replace(p, name=f"{p.name}/{n}", turns=("Go on.",) * (n % 2)) for n in range(4) for p in PROMPTS]
    run = run_of(llm, prompts)
    found = measured(run, plain_every=2)
    asked = Counter(row["setting"] for row in found["answers"])
    plain = asked["none"]
    assert asked["suffix"] == asked["ngram"] == 54 and 18 < plain < 36
    figures = found["conditions"][0]["figures"]
    assert figures["none"]["all"]["speedup"] == [1.0, 1.0, 1.0] and figures["none"]["all"]["prompts"] == 18
    for name in ("suffix", "ngram"):
        each = figures[name]["all"]
        assert (each["prompts"], each["identical"]["answers"], each["identical"]["of"]) == (36, plain, plain)
        value, low, high = each["speedup"]
        assert low <= value <= high
        assert value == pytest.approx(each["tok_s"][0] / figures["none"]["all"]["tok_s"][0], rel=1e-3)
        wide = each["speedup_beyond"]
        assert wide[0] == value and wide[1] <= low and high <= wide[2]
    assert set(found["verdicts"]) == {"all", "fox", "code", "dog"}
    assert compare_results(found, found)["settings"][0]["change"][0] == 1.0


def test_every_beginning_has_all_categories_alike() -> None:
    order = stratified(PROMPTS)
    assert sorted(order) == list(range(9))
    for start in (0, 3, 6):
        assert {PROMPTS[index].category for index in order[start : start + 3]} == {"fox", "code", "dog"}


def test_no_setting_profits_from_the_prompt_of_another(llm: LLM) -> None:
    """Every answer computes its whole prompt, although another setting has just read the same one."""
    long = [BenchPrompt("long", "long", ({"role": "user", "content": "fox " * 60},))]
    run = run_of(llm, long)
    rows: list[int] = []
    forward = llm.model.forward

    def counted(cache: Any, store: Any, segments: Any, **more: Any) -> Any:
        rows.append(sum(segment.rows for segment in segments))
        return forward(cache, store, segments, **more)

    llm.model.forward = counted  # type: ignore[method-assign]
    try:
        measured(run)
    finally:
        llm.model.forward = forward  # type: ignore[method-assign]
    whole = run.answers[0].prompt_tokens
    assert sum(row >= whole for row in rows) == len(run.settings)


def test_counters_and_times_fit_together(llm: LLM) -> None:
    run = run_of(llm)
    found = measured(run)
    for answer in run.answers:
        assert sum(count for _, count in answer.chunks) == len(answer.token_ids) == answer.stats.emitted
        assert len(answer.chunks) == answer.stats.steps
        assert answer.chunks[0][0] == pytest.approx(answer.ttft_ms)
        assert answer.chunks[-1][0] == pytest.approx(answer.e2e_ms)
        assert 0 < answer.ttft_ms <= answer.e2e_ms <= answer.wall_ms * 1.001
    figures = found["conditions"][0]["figures"]
    assert figures["none"]["all"]["speedup"] == [1.0, 1.0, 1.0]
    assert figures["none"]["all"]["tokens_per_step"] == figures["none"]["all"]["break_even_tokens_per_step"] == 1.0
    for name in ("suffix", "ngram"):
        each = figures[name]["all"] or figures[name]["looping"]
        total = Stats()
        kept = ConditionTable(run.answers, run.conditions[0], Grouping([p.category for p in PROMPTS], {}))
        keys = kept.chosen("all") or kept.chosen("looping")
        for answer in kept.answers(name, keys):
            total.add(answer.stats)
        assert each["tokens_per_step"] == pytest.approx(total.emitted / total.steps, abs=1e-4)
        assert each["acceptance_length"] == pytest.approx(1 + total.accepted / total.drafting_steps, abs=1e-4)
        assert each["accepted_by_depth"][0] == pytest.approx(
            total.accepted_by_depth[0] / total.drafting_steps, abs=1e-4
        )
        assert sum(each["accepted_by_depth"]) == pytest.approx(each["acceptance_length"] - 1, abs=2e-3)
        joint = 1.0
        for given, both in zip(each["accepted_given_parent"], each["accepted_by_depth"], strict=True):
            joint *= given
            assert joint == pytest.approx(both, abs=2e-3)
        split = each["step_ms"]
        assert split["draft"] + split["verify"] + split["other"] == pytest.approx(split["total"], abs=1e-3)
        assert each["identical"] == {"answers": len(keys), "of": len(keys), "first_difference": None}


def test_sweeps_change_one_thing_at_a_time(llm: LLM) -> None:
    asked = conditions([1, 3], [200], [0.0, 0.8], [4])
    assert [str(condition) for condition in asked] == [
        "batch 1, context 200, temperature 0, 4 nodes",
        "batch 3, context 200, temperature 0, 4 nodes",
        "batch 1, context 200, temperature 0.8, 4 nodes",
    ]
    assert [c.nodes for c in conditions(nodes=[4, 8])] == [None, 4, 8]
    run = run_of(llm, asked=asked)
    found = measured(run)
    assert [len(each["figures"]) for each in found["conditions"]] == [3, 3, 3]
    assert all(180 <= answer.prompt_tokens <= 210 for answer in run.answers)
    assert max(answer.stats.drafted / max(1, answer.stats.steps) for answer in run.answers) <= 4
    groups = Counter((a.group, a.round, a.setting) for a in run.answers if a.condition == 1)
    assert set(groups.values()) == {6}, "twice as many as run at once"
    cold, warm = ([a.token_ids for a in run.answers if a.condition == c and a.setting == "none"] for c in (0, 2))
    assert cold != warm


def test_turns_are_asked_after_the_answers(llm: LLM) -> None:
    turns = [BenchPrompt("talk", "talk", ({"role": "user", "content": "The quick"},), turns=("brown", "fox"))]
    run = run_of(llm, turns)
    measured(run)
    by_setting = defaultdict(list)
    for answer in run.answers:
        by_setting[answer.setting].append((answer.turn, answer.prompt_tokens, answer.token_ids))
    assert by_setting["none"] == by_setting["suffix"] == by_setting["ngram"]
    lengths = [length for _, length, _ in by_setting["none"]]
    assert [turn for turn, _, _ in by_setting["none"]] == [0, 1, 2] and lengths == sorted(set(lengths))


def test_prompts_without_room_for_an_answer_are_named_and_not_shortened(llm: LLM) -> None:
    huge = BenchPrompt("huge", "huge", ({"role": "user", "content": "fox " * 480},))
    run = run_of(llm, [*PROMPTS, huge])
    assert len(run.fitting) == 9 and list(run.skipped) == ["huge"]
    with pytest.raises(PromptError, match="no prompt leaves room"):
        _ = run_of(llm, [huge]).fitting


def test_a_field_for_servers_is_refused(llm: LLM) -> None:
    asked = ({"role": "user", "content": "x"},)
    for wire, message in (
        ({"tool_choice": "required"}, "s: tool_choice needs a server"),
        ({"response_format": {"type": "yaml"}}, "s: response_format=.* is not known"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "s: "),
    ):
        with pytest.raises(PromptError, match=message):
            run_of(llm, [BenchPrompt("s", "s", asked, wire=wire)])
    with pytest.raises(OptionError, match="nothing to compare"):
        check_settings(["none"])


def test_a_format_is_honoured(llm: LLM) -> None:
    wire = {"response_format": {"type": "json_object"}, "prediction": {"type": "content", "content": "{}"}}
    run = run_of(llm, [BenchPrompt("j", "j", ({"role": "user", "content": "x"},), wire=wire)])
    measured(run)
    assert all(answer.text.lstrip().startswith("{") for answer in run.answers)


def test_a_run_ends_when_its_time_is_up(llm: LLM) -> None:
    run = run_of(llm)
    began = time.monotonic()
    run_bench(run, began + 2.0, 0.0, lambda status: None)
    assert 1.0 < time.monotonic() - began < 3.5
    assert max(answer.round for answer in run.answers) >= 1, "prompts are asked again while there is time"


def test_a_run_ends_when_it_is_precise_enough(llm: LLM) -> None:
    run = run_of(llm)
    run_bench(run, time.monotonic() + 60.0, 100.0, lambda status: None)
    assert len(run.answers) <= 3 * 9


def synthetic(speedups: dict[str, float], slower: float = 1.0) -> dict[str, Any]:
    """Results of 44 prompts of eleven categories with these speed-ups."""
    import numpy as np

    rng = np.random.default_rng(7)
    rows = []
    for number in range(44):
        length = int(rng.integers(40, 129))
        for setting, speed in {"none": 1.0, **speedups}.items():
            factor = slower if setting != "none" else 1.0
            ms = 12.0 * length / speed * factor * float(np.exp(0.04 * rng.standard_normal()))
            rows.append({"condition": 0, "setting": setting, "prompt": f"p{number}", "category": f"c{number % 11}",
                         "turn": 0, "tokens": length, "e2e_ms": ms})  # fmt: skip
    figures = {name: {"all": {"speedup": [speed / slower, None, None]}} for name, speed in speedups.items()}
    found = {"settings": ["none", *speedups], "answers": rows, "conditions": [{"figures": figures}]}
    return {**found, "model": {"name": "m"}, "workload": {"prompts": 44}}


def test_a_planted_slowdown_is_found_and_nothing_else() -> None:
    first = synthetic({"suffix": 1.5, "ngram": 1.2})
    second = copy.deepcopy(first)
    for row in second["answers"]:
        row["e2e_ms"] *= 1.1 if row["setting"] == "suffix" else 1.0
        row["e2e_ms"] *= 1.5  # another machine
    compared = compare_results(first, second)
    suffix, ngram = compared["settings"]
    assert Interval(*suffix["change"]).below_one and suffix["change"][0] == pytest.approx(1 / 1.1, rel=0.02)
    assert suffix["verdict"].startswith("suffix gains less")
    assert "no difference" in ngram["verdict"]
    assert compared["plain"]["change"][0] == pytest.approx(1 / 1.5, rel=0.02)
    with pytest.raises(OptionError, match="no setting in common"):
        compare_results(first, synthetic({"eagle3": 1.0}))
    # The second run asked plain decoding a fifth of the prompts.
    second["answers"] = [r for r in second["answers"] if r["setting"] != "none" or int(r["prompt"][1:]) % 5 == 0]
    suffix, ngram = compare_results(first, second)["settings"]
    assert Interval(*suffix["change"]).below_one and suffix["change"][0] == pytest.approx(1 / 1.1, rel=0.04)
    assert "no difference" in ngram["verdict"]


def test_two_runs_of_the_same_do_not_differ(llm: LLM) -> None:
    both = []
    for _ in range(2):
        run = run_of(llm)
        both.append({**measured(run, rounds=3), "machine": {}})
    compared = compare_results(*both)
    for row in compared["settings"]:
        first, second = row["first"], row["second"]
        assert first[1] <= second[2] and second[1] <= first[2], row


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ({"a": [2.0, 1.5, 2.6]}, "use a: 2.00x as fast (1.50 to 2.60)"),
        ({"a": [2.0, 1.5, 2.6], "b": [0.8, 0.7, 0.9]}, "leave out b, which slow it down"),
        ({"a": [1.02, 0.9, 1.1]}, "no gain shown: a gave 1.02x (0.90 to 1.10)"),
        ({"a": [0.8, 0.7, 0.9]}, "do not draft: the best, a, is 20% slower (0.70 to 0.90)"),
        ({"a": [2.0, None, None]}, "a gave 2.00x on 8 prompts: too few for a verdict"),
    ],
)
def test_verdicts(speeds: dict[str, list[float | None]], said: str) -> None:
    figures = {"none": {"x": {"speedup": [1.0, 1.0, 1.0], "prompts": 8}}}
    figures |= {name: {"x": {"speedup": speed, "prompts": 8}} for name, speed in speeds.items()}  # type: ignore[dict-item]
    assert said in verdict(figures, "x")


def test_looping_answers_are_kept_apart() -> None:
    def answer(setting: str, prompt: int, ids: list[int]) -> Answer:
        stats = Stats(steps=len(ids), emitted=len(ids), decoded=len(ids) - 1, decode_ms=10.0, prefill_ms=1.0)
        times = tuple((float(i), 1) for i in range(len(ids)))
        return Answer(0, setting, prompt, 0, 0, prompt, 5, tuple(ids), 1.0, 11.0, times, 11.0, stats)

    loop, fine = [1, 2, 3] * 20, list(range(60))
    answers = [answer(s, p, ids) for s in ("none", "suffix") for p, ids in ((0, loop), (1, fine))]
    table = ConditionTable(answers, Condition(), Grouping(["a", "b"], {"a": 1, "b": 1}))
    assert table.looping == {(0, 0)} and table.categories == ["b"]
    kept, apart = figures(table, "suffix", "all"), figures(table, "suffix", "looping")
    assert kept is not None and apart is not None and (kept["prompts"], apart["prompts"]) == (1, 1)


def test_the_verb_writes_results_and_compares_them(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"The quick {n}", "category": "c"}) for n in range(4)))
    out = tmp_path / "out"
    line = ["bench", "-m", tiny, "--prompts", str(file), "--tokens", "16", "--minutes", "0.1", "-o", str(out)]
    done = invoke(*line, "--speculate", "suffix", "--price", "$2.5/h")
    assert done.exit_code == 0, done.output
    assert "verdicts" in done.output and "per 1M tokens" in done.output
    saved = json.loads((out / "results.json").read_text())
    assert (saved["format"], saved["version"], saved["settings"]) == ("slipstream-bench", 1, ["none", "suffix"])
    assert saved["versions"]["slipstream"] and saved["machine"]["cpu"] and saved["arguments"]["tokens"] == 16
    assert saved["peak_memory"]["host_bytes"] > 1e6
    each = saved["conditions"][0]["figures"]["suffix"]
    some = each["all"] or each["looping"]
    assert some["cost_per_million_tokens"] == pytest.approx(2.5 / 3600 / some["tok_s"][0] * 1e6, rel=1e-3)
    compared = invoke("bench", "compare", str(out), str(out / "results.json"))
    assert compared.exit_code == 0 and "suffix: no difference shown (+0.0%)" in compared.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "batch=0 is out of range"),
        (["--batch", "x"], "--batch 'x' is not a list of numbers"),
        (["--price", "cheap"], "--price 'cheap' is not a price per hour"),
        (["--minutes", "0"], "minutes=0.0 is out of range"),
        (["--prompts", "nowhere.jsonl"], "'nowhere.jsonl' cannot be read"),
        (["--speculate", "nonsense"], "unknown drafter 'nonsense'"),
        (["--url", "http://x", "--speculate", "suffix"], "--speculate needs a model of this process"),
        (["compare", "nowhere.json", "nowhere.json"], "'nowhere.json' cannot be read"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    line = ["bench", *options] if options[0] == "compare" else ["bench", "-o", str(tmp_path), *options]
    done = invoke(*line)
    assert done.exit_code == 2 and f"error: {message}" in done.stderr
