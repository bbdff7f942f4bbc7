"""`slipstream tune`: agreement is what drafting gives, the search finds what is there, the finding is used."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from slipstream import LLM, SamplingParams
from slipstream.bench.tune.agreement import LONGEST_ANSWER, Agreement, Text
from slipstream.bench.tune.costs import DEEPEST, Costs, measure_costs
from slipstream.bench.tune.layer_skip import tune
from slipstream.bench.tune.progress import TuneProgress
from slipstream.bench.tune.prompts import question, read_prompts, spread
from slipstream.bench.tune.search import Layers, Point, Search
from slipstream.cli import app
from slipstream.drafters import tuned
from slipstream.drafters.layer_skip import format_layers, parse_layers
from slipstream.errors import CorruptFile, OptionError, PromptError, SlipstreamError
from slipstream.models.formats.builtin import DEFAULT_MODEL
from tests.tiny import tiny_directory

COUNT = 6
PROMPTS = [[5, 3, 8, 1, 2] * 4, [7, 9, 11, 30, 2, 2, 64] * 17, [12, 40]]  # the second answer crosses a page
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def build(**shape: Any) -> LLM:
    return LLM(tiny_directory(0, layers=COUNT, **shape), speculate=None)


def answered(llm: LLM) -> list[Text]:
    return [Text(o.prompt_token_ids, o.token_ids) for o in llm.generate(PROMPTS, GREEDY)]


def idle_layer(folder: Path, layer: int) -> Path:
    """A tiny model one of whose layers adds nothing."""
    shutil.copytree(tiny_directory(0, layers=COUNT, characters=True), folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(weights, folder / "model.safetensors")
    return folder


# -- agreement --------------------------------------------------------------------------------------------------------


def test_the_whole_model_agrees_with_itself_and_the_cache_is_given_back() -> None:
    llm = build()
    free = llm.cache.available
    with Agreement(llm.target, answered(llm)) as agreement:
        assert (agreement.texts, agreement.positions) == (3, 3 * 39)
        assert agreement(range(COUNT)) == 1.0
        assert llm.cache.available < free
    assert llm.cache.available == free


@pytest.mark.parametrize(("skip", "window"), [("2", None), ("1/4", None), ("0-1/3", 24), ("5", 24)])
def test_agreement_is_what_drafting_step_by_step_gives(skip: str, window: int | None) -> None:
    llm = build(sliding_window=window)
    texts, layers = answered(llm), sorted(set(range(COUNT)) - parse_layers(skip))
    with Agreement(llm.target, texts) as agreement:
        right = agreement.by_root(layers)
        rough = agreement.by_root(layers, rough=True)
        assert agreement(layers) == sum(map(sum, right)) / agreement.positions
    assert [list(few) for few in rough] == [list(all_[::4]) for all_ in right]
    assert 0 < sum(map(sum, right)) < 3 * 39, "a subset that is always right, or never, would prove little"
    llm.use(f"layer_skip:skip={skip},depth=1,nodes=1")
    for text, found in zip(texts, right, strict=True):
        # Each root by itself: the root is the first token after a prompt, the drafted one the second. After a prompt
        # that ends one token into a page the first one may be drafted too; such a root is left out.
        before = [text.prompt + text.answer[:root] for root in range(len(text.answer) - 1)]
        origins = [o.stats.origins for o in llm.generate(before, SamplingParams(temperature=0.0, max_tokens=3))]
        roots = [root for root, (first, _, _) in enumerate(origins) if first is None]
        assert len(roots) >= len(found) - 1
        assert [origins[root][1] is not None for root in roots] == [found[root] for root in roots]
        # A whole answer: where a draft is right the next root is two tokens further.
        (output,) = llm.generate([text.prompt], GREEDY)
        root, expected = 0, [False]
        while len(expected) < len(text.answer):
            expected += [True, False] if found[root] and len(text.answer) - len(expected) > 1 else [False]
            root = len(expected) - 1
        assert output.token_ids == text.answer
        assert [origin is not None for origin in output.stats.origins] == expected


def test_positions_are_spread_over_many_texts() -> None:
    llm = build()
    prompts = [[index, 1, 2] for index in range(30)]
    outputs = llm.generate(prompts, GREEDY)
    with Agreement(llm.target, [Text(o.prompt_token_ids, o.token_ids) for o in outputs]) as agreement:
        assert agreement.texts == 30 and agreement.positions == 30 * (512 // 30)
        assert agreement(range(COUNT)) == 1.0


def test_answers_of_one_token_are_refused() -> None:
    llm = build()
    with pytest.raises(PromptError, match="no answer is long enough"):
        Agreement(llm.target, [Text([1, 2], [3])])


# -- costs ------------------------------------------------------------------------------------------------------------


def test_the_estimate_is_the_expectation_of_a_chain() -> None:
    costs = Costs(layers=10, verify=(1.0, 1.0, 1.1, 1.2), head=0.1)
    assert costs.draft(10) == pytest.approx(1.0) and costs.draft(0) == pytest.approx(0.1)
    best = costs.estimate(0.8, 3)
    speeds = [(1 - 0.8 ** (d + 1)) / 0.2 / (costs.verify[d] + d * 0.37) for d in (1, 2, 3)]
    assert best.speedup == pytest.approx(max(speeds)) and speeds[best.depth - 1] == max(speeds)
    assert costs.estimate(0.0, 3).speedup == pytest.approx(1 / 1.37)
    assert costs.estimate(1.0, 3).speedup == pytest.approx(4 / (1.2 + 3 * 0.37))


def test_costs_are_medians_of_passes_and_leave_nothing() -> None:
    llm = build()
    free = llm.cache.available
    ticks = itertools.count()
    costs = measure_costs(llm.target, [1, 2, 3], 130, clock=lambda: float(next(ticks)))
    assert costs == Costs(COUNT, (1.0,) * (DEEPEST + 1), 1.0)
    assert llm.cache.available == free


# -- the search -------------------------------------------------------------------------------------------------------


class Made:
    """A measure that is known: each layer is worth something, and some pairs are worth nothing without each other."""

    def __init__(self, worth: list[float], pairs: tuple[tuple[int, int], ...] = ()) -> None:
        self.worth, self.pairs = worth, pairs
        self.asked: list[tuple[Layers, bool]] = []

    def __call__(self, layers: Layers, *, rough: bool) -> float:
        self.asked.append((layers, rough))
        return self.value(layers)

    def value(self, layers: Layers) -> float:
        alone = {layer for pair in self.pairs if len(set(pair) & set(layers)) == 1 for layer in pair}
        return sum(self.worth[layer] for layer in layers if layer not in alone)

    def run(self, expired: Any = lambda: False, seed: int = 0) -> list[Point]:
        costs = Costs(len(self.worth), (1.0,) * 5, 0.0)
        score = lambda point: costs.estimate(point.agreement, len(point.layers)).speedup  # noqa: E731
        return Search(len(self.worth), self, score, expired, seed).run()


def test_layers_go_in_the_order_of_their_worth() -> None:
    frontier = Made([0.3, 0.06, 0.2, 0.0, 0.4, 0.04]).run()
    assert [point.layers for point in frontier] == [(4,), (0, 4), (0, 2, 4), (0, 1, 2, 4), (0, 1, 2, 4, 5)]
    assert [point.agreement for point in frontier] == pytest.approx([0.4, 0.7, 0.9, 0.96, 1.0])


def test_small_changes_find_what_greed_has_missed() -> None:
    """Layers 0 and 1 are worth most, but only together: taking away one after the other loses them first."""
    made = Made([0.29, 0.29, 0.15, 0.14, 0.13], pairs=((0, 1),))
    frontier = {len(point.layers): point for point in made.run()}
    assert frontier[2].layers == (0, 1)
    best = {size: max(made.value(s) for s in itertools.combinations(range(5), size)) for size in range(1, 5)}
    assert {size: point.agreement for size, point in frontier.items()} == pytest.approx(best)


def test_the_same_seed_asks_the_same_questions() -> None:
    worth = [0.07, 0.11, 0.02, 0.3, 0.05, 0.25, 0.1, 0.1]
    first, again, other = (Made(worth, pairs=((1, 4), (5, 6))) for _ in range(3))
    assert first.run(seed=1) == again.run(seed=1)
    assert first.asked == again.asked
    other.run(seed=2)
    assert other.asked != first.asked
    assert len(set(first.asked)) == len(first.asked), "nothing is measured twice"


@pytest.mark.parametrize("budget", [0, 1, 7, 30, 100])
def test_the_search_ends_when_the_time_is_up(budget: int) -> None:
    made = Made([0.01 * layer for layer in range(12)])
    frontier = made.run(expired=lambda: len(made.asked) >= budget)
    assert len(made.asked) == max(1, budget)
    assert frontier and all(0 < len(point.layers) < 12 for point in frontier)


# -- all of it --------------------------------------------------------------------------------------------------------


def ticking() -> Iterator[float]:
    return itertools.count(0.0, 0.01)


def test_the_layer_that_adds_nothing_is_spared_first(tmp_path: Path) -> None:
    llm = LLM(idle_layer(tmp_path / "model", 3), speculate=None)
    with Agreement(llm.target, answered(llm)) as agreement:
        frontier = Search(COUNT, agreement, lambda point: point.agreement, lambda: False).run()
    assert frontier[-1] == Point((0, 1, 2, 4, 5), 1.0)
    assert all(3 not in point.layers for point in frontier)


def test_a_run_is_repeatable_and_its_finding_whole() -> None:
    llm = build()
    told: list[str] = []
    runs = []
    for _ in range(2):
        clock = ticking()
        runs.append(tune(llm, PROMPTS, 3.0, TuneProgress(told.append), clock=lambda clock=clock: next(clock)))
    assert runs[0]["frontier"] == runs[1]["frontier"]
    finding = runs[0]
    assert finding["prompts"] == {"searched": 2, "positions": 2 * (LONGEST_ANSWER - 1), "held_out": 1}
    assert finding["fingerprint"] == llm.target.fingerprint
    assert runs[0]["measured"] == runs[1]["measured"]
    assert {"format", "method", "model", "skip", "depth", "agreement", "estimated_speedup", "versions"} <= set(finding)
    assert finding["measured"]["identical"] is True
    # By this clock every step takes as long as a plain one, so the gain is what a step gives.
    assert finding["measured"]["speedup"] == finding["measured"]["tokens_per_step"] > 1
    assert finding["measured"]["speedup"] == max(entry["speedup"] for entry in finding["confirmed"])
    assert finding["skip"] in [point["skip"] for point in finding["frontier"]]
    json.dumps(finding, allow_nan=False)
    assert any("ms" in line for line in told)


def test_a_tiny_budget_still_ends_with_an_answer() -> None:
    llm = build()
    finding = tune(llm, [PROMPTS[0]], 1e-9)
    assert [point["layers_run"] for point in finding["frontier"]] == [COUNT - 1]
    assert finding["prompts"]["held_out"] == 0
    llm.use(f"layer_skip:skip={finding['skip']}")


def test_what_cannot_be_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has 2 layers: too few to choose from"):
        tune(LLM(tiny_directory(0), speculate=None), PROMPTS, 1.0)
    with pytest.raises(PromptError, match="no prompt is usable"):
        tune(LLM(tiny_directory(0, layers=3), speculate=None), [[1] * 500], 1.0)
    shape = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=97, n_positions=256)
    GPT2LMHeadModel(shape).save_pretrained(str(tmp_path))
    with pytest.raises(OptionError, match="cannot run some of its layers alone"):
        tune(LLM(tmp_path, speculate=None), PROMPTS, 1.0)


def test_a_finding_is_used_for_its_target_alone() -> None:
    llm, other = build(), LLM(tiny_directory(0, layers=5), speculate=None)
    fingerprint = llm.target.fingerprint
    assert fingerprint != other.target.fingerprint

    def skipped(llm: LLM) -> str:
        llm.use("layer_skip")
        return format_layers(set(range(llm.model.config.layers)) - set(llm.drafter.layers))

    before = skipped(llm), skipped(other)
    place = tuned.path("layer_skip", fingerprint)
    tuned.save(place, {"format": 1, "skip": "0/4"})
    assert "0/4" not in before
    assert (skipped(llm), skipped(other)) == ("0/4", before[1])
    place.write_text('{"skip": ')
    with pytest.raises(CorruptFile, match="cannot be read"):
        llm.use("layer_skip")
    tuned.save(place, {"format": 1})
    with pytest.raises(CorruptFile, match="names no layers"):
        llm.use("layer_skip")


@pytest.mark.real_model
def test_the_finding_that_comes_along_belongs_to_the_built_in_model(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, speculate="layer_skip")
    finding = tuned.find("layer_skip", llm.target.fingerprint)
    assert finding is not None and finding["model"] == DEFAULT_MODEL
    assert set(llm.drafter.layers) == set(range(30)) - parse_layers(finding["skip"])


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_read_from_files(tmp_path: Path) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("\ufeffone\n\n  two \n")
    assert read_prompts(lines) == [question("one"), question("two")]
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    entries = [{"prompt": "p"}, {"question": "q"}, {"turns": ["first", "second"]}, {"messages": chat}]
    objects.write_text("\n".join(map(json.dumps, entries)))
    assert read_prompts(objects) == [question("p"), question("q"), question("first"), chat[:2]]
    assert spread([[index] for index in range(10)], 4) == [[0], [2], [5], [7]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", " \n\n", "has no prompts"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.csv", "x", "is not a file of prompts"),
        ("a.txt", None, "cannot be read: No such file"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2 is not JSON"),
        ("a.jsonl", '{"answer": "x"}', "line 1 has no prompt"),
        ("a.jsonl", "[1]", "line 1 has no prompt"),
        ("a.jsonl", '{"turns": []}', "there is no prompt in 'turns'"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "there is no prompt in 'messages'"),
        ("a.jsonl", '{"messages": ["x"]}', "there is no prompt in 'messages'"),
        ("a.jsonl", '{"prompt": 3}', "there is no prompt in 'prompt'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SlipstreamError, match=message):
        read_prompts(path)


# -- the command ------------------------------------------------------------------------------------------------------


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_the_command_finds_shows_and_keeps(tmp_path: Path) -> None:
    model, prompts, shipped = idle_layer(tmp_path / "model", 2), tmp_path / "prompts.txt", tmp_path / "found.json"
    prompts.write_text("What is it?\nabc abc abc\n1 + 1 = 2, 2 + 2 =\nHello\n")
    options = ["--method", "layer_skip", "-m", model, "--prompts", prompts, "--budget", "2", "-o", shipped]
    done = invoke(*options)
    assert done.exit_code == 0, done.stderr
    assert "agreement" in done.stdout and "100.0%" in done.stdout
    assert "Measured on 1 prompt that the search did not see" in done.stdout and "texts identical" in done.stdout
    finding = json.loads(shipped.read_text())
    slower = "Plain decoding is faster: layer_skip does not pay on this model." in done.stdout
    assert slower == (finding["measured"]["speedup"] < 1)
    assert ("The figures are impossible" in done.stdout) == finding["measured"]["disturbed"]
    assert f"--speculate layer_skip:depth={finding['depth']},nodes={finding['depth']}" in done.stdout
    assert finding["prompts"]["source"] == str(prompts)
    llm = LLM(model, speculate="layer_skip")
    assert tuned.find("layer_skip", llm.target.fingerprint) == finding
    assert set(llm.drafter.layers) == set(range(COUNT)) - parse_layers(finding["skip"])
    again = json.loads(invoke(*options, "--json").stdout)
    assert again["frontier"][-1]["skip"] == "2" and again["frontier"][-1]["agreement"] == 1.0
    assert again["saved"][1] == str(shipped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "layerskip"], "error: unknown method to tune 'layerskip'\nhint: did you mean 'layer_skip'?"),
        (["--method", "layer_skip", "--budget", "0"], "error: budget=0.0 is out of range"),
        (["--method", "layer_skip", "--budget", "nan"], "error: budget=nan is out of range"),
        (["--method", "layer_skip", "--prompts", "missing.txt"], "error: 'missing.txt' cannot be read"),
        (["--method", "layer_skip", "-o", "no/such/folder/file.json"], "cannot be written"),
        (["--method", "layer_skip", "-m", "TINY"], "has 2 layers: too few to choose from"),
        (["--method", "layer_skip", "-m", "SILENT"], "has no tokenizer"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_in_a_line(options: list[str], message: str) -> None:
    folders = {"TINY": tiny_directory(0, characters=True), "SILENT": tiny_directory(0, layers=COUNT)}
    done = invoke(*[folders.get(option, option) for option in options])
    assert done.exit_code == 2 and not done.stdout
    assert message in done.stderr and done.stderr.count("\n") <= 2
