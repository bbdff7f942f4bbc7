"""The figures of the GPU benchmarks: parts of a step, near-ties, the table."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.bodies.bodies import BodyCheckpoint
from benchmarks.bodies.shapes import BodyShape
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import companions, costs
from benchmarks.gpu.__main__ import skipping
from benchmarks.gpu.answers import Answers
from benchmarks.gpu.floor import Floor, weights_of_a_row
from benchmarks.gpu.hf import Peer, hf_model
from benchmarks.gpu.near_ties import NearTies, add_partings, add_rows
from benchmarks.gpu.steps import Step, Throughput
from benchmarks.gpu.table import COLUMNS, table
from slipstream import LLM, SamplingParams
from slipstream.bench.cost_table import costs_of
from slipstream.drafters import tuned
from slipstream.errors import ModelNotFound
from slipstream.models.decoder import Decoder
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.types import Stats
from tests.lessons import lesson_of, new_head, saved, teach, written
from tests.tiny import tiny_directory, tiny_llm

PROMPTS = [[5, 9, 2, 7], [11, 3, 3, 8, 20], [40, 41, 42]]
LENGTH = 12
BODY, SMALL = BodyShape(160, 10, 9, 3, 32, 128, 131), BodyShape(144, 5, 8, 4, 16, 112, 131)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def judged(llm: LLM, prompts: list[list[int]], length: int = LENGTH) -> list[Any]:
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=97))


def answered(drafter: str, tokens: list[int], steps: int, ms: float) -> Answers:
    """Two answers of the same counts."""
    stats = [Stats(steps=steps, emitted=len(tokens), decoded=len(tokens) - 1, decode_ms=ms) for _ in range(2)]
    return Answers(drafter, [tokens, tokens], stats, ["coding", "writing"])


# -- near-ties --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("place", [0, 4, LENGTH - 1])
def test_a_parting_is_judged_by_the_two_tokens_after_the_common_text(llm: LLM, rank: int, place: int) -> None:
    plain = judged(llm, PROMPTS)
    texts = [output.token_ids for output in plain]
    ranked = sorted((found.rank, token, found.logprob) for token, found in plain[1].logprobs[place].items())
    (_, first, likelier), (_, other, likely) = ranked[0], ranked[rank]
    assert first == texts[1][place]
    parted = [texts[0], [*texts[1][:place], other, *reversed(texts[1][place + 1 :])], texts[2]]
    ties = NearTies()
    add_partings(ties, llm, PROMPTS, texts, parted)
    assert ties.partings == pytest.approx([likelier - likely], abs=1e-5)


def test_answers_that_do_not_part_say_nothing(llm: LLM) -> None:
    texts = [output.token_ids for output in judged(llm, PROMPTS)]
    ties = NearTies()
    add_partings(ties, llm, PROMPTS, texts, texts)
    assert ties.partings == []
    assert str(ties) == "no answer diverged"


def test_every_row_has_its_gap(llm: LLM) -> None:
    rows = [row for output in judged(llm, PROMPTS) for row in output.logprobs]
    ties = NearTies()
    add_rows(ties, llm, PROMPTS, LENGTH)
    gaps = [sorted((found.logprob for found in row.values()), reverse=True) for row in rows]
    expected = [first - second for first, second, *_ in gaps]
    assert len(expected) == LENGTH * len(PROMPTS)
    assert ties.all == pytest.approx(expected, abs=1e-5)


def test_near_ties_are_counted() -> None:
    told = str(NearTies(partings=[0.004, 0.02, 0.02, 0.5], all=[0.001, 0.05, 2.0, 3.0, 4.0]))
    assert "4 partings" in told
    assert "median 0.020, largest 0.500" in told
    assert "under 0.01: 25% of the partings, 20.00% of all rows" in told
    assert "under 0.1: 75% of the partings, 40.00% of all rows" in told


# -- a step's parts ---------------------------------------------------------------------------------------------------


def test_a_row_reads_every_weight_of_a_dense_model_but_the_embedding(llm: LLM) -> None:
    model = llm.model
    assert isinstance(model, Decoder)
    c = model.config
    attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    mlp = 3 * c.hidden_size * c.intermediate_size
    assert weights_of_a_row(model) == 4 * (c.layers * (attention + mlp) + c.hidden_size * c.vocab_size)


def test_the_rest_of_a_step_is_what_the_clock_has_beyond_both_halves() -> None:
    found = answered("eagle3", list(range(21)), steps=6, ms=30.0).report(answered("none", list(range(21)), 21, 80.0))
    # The first step of an answer reads the prompt and is not part of the time.
    assert found.step_ms == pytest.approx(6.0)
    halves = Step("eagle3", 1, 100, 63, draft_ms=1.0, verify_ms=4.5, capture_ms=0.0, graph_mib=0.0)
    split = found.beside(halves, weights=12_000_000_000)
    assert (split.draft_ms, split.verify_ms) == (1.0, 4.5)
    assert split.rest_ms == pytest.approx(0.5)
    assert split.gb_per_s == pytest.approx(2000.0)
    assert found.beside(None, 12_000_000_000).rest_ms is None


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_all_that_was_measured() -> None:
    plain = answered("none", list(range(21)), steps=21, ms=80.0)
    trees = answered("eagle3:checkpoint=/tmp/x", list(range(21)), steps=6, ms=32.0)
    cascade = answered("cascade:suffix+draft_model:model=/tmp/x/1b,depth=6", list(range(21)), steps=9, ms=160.0)
    halves = Step("eagle3:checkpoint=/tmp/x,nodes=7", 1, 1900, 7, 1.0, 4.76, 20.0, 8.0)
    found = {
        "floor": [asdict(Floor(1, 4.0, 3700.0))],
        "steps": [asdict(halves)],
        "profile": [{"kernel": "a", "us": 1.0}],
        "answers": [
            asdict(plain.report(None).beside(None, 16_000_000_000)),
            asdict(trees.report(plain).beside(halves, 16_000_000_000)),
            asdict(cascade.report(plain).beside(None, 16_000_000_000)),
        ],
        "batches": [
            asdict(Throughput("none", 64, 10_000.0, 1.0, 6.4, 2500.0)),
            asdict(Throughput("suffix+eagle3:checkpoint=/tmp/x,depth=2", 64, 14_000.0, 2.3, 10.5, 1500.0)),
        ],
        "peers": [asdict(Peer("transformers, plain", 25.0))],
    }
    header, line, *rows = [[cell.strip() for cell in text.strip("|").split("|")] for text in table(found).splitlines()]
    assert header == list(COLUMNS)
    assert len(line) == len(header)
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(cells) == [
        "products alone, 1 rows",
        "a round: eagle3:nodes=7",
        "answers: none",
        "answers: eagle3",
        "answers: cascade:suffix+draft_model:model=1b,depth=6",
        "throughput: none",
        "throughput: suffix+eagle3:depth=2",
        "transformers, plain",
    ]
    assert cells["products alone, 1 rows"]["GB/s"] == "3,700"
    assert (cells["a round: eagle3:nodes=7"]["context"], cells["a round: eagle3:nodes=7"]["step ms"]) == (
        "1,900",
        "5.76",
    )
    shown = cells["answers: eagle3"]
    assert (shown["tok/s"], shown["over plain"], shown["GB/s"]) == ("625.0", "2.50", "2,500")
    assert (shown["step ms"], shown["rest ms"], shown["rest"]) == ("6.40", "0.64", "10.0%")
    assert (shown["worst"], shown["same as plain"]) == ("2.50", "100%")
    assert cells["throughput: suffix+eagle3:depth=2"]["over plain"] == "1.40"
    assert cells["transformers, plain"]["over plain"] == "0.10"
    assert cells["transformers, plain"]["draft ms"] == ""


def test_the_table_can_do_without_plain_decoding() -> None:
    assert table({"peers": [asdict(Peer("transformers, plain", 25.0))]}).endswith("| 25.0 |" + "  |" * 10)


def test_measured_rounds_make_a_table_of_costs() -> None:
    drafters = {"eagle3": "eagle3:checkpoint=/tmp/x", "mtp": "mtp:checkpoint=/tmp/y"}
    wanted = list(costs.shapes(drafters, ["suffix+eagle3:checkpoint=/tmp/x"]))
    assert len(set(wanted)) == len(wanted) and wanted[0] == ("none", 256, 1)
    assert {spec for spec, _, _ in wanted[4:7]} == {"suffix+eagle3:checkpoint=/tmp/x", *drafters.values()}

    def ms(rows: int, batch: int, context: int) -> float:
        return 4.0 + 0.01 * rows + 2e-5 * batch * context

    rows = []
    for spec, context, batch in wanted:
        nodes = 0 if spec == "none" else int(re.findall(r"nodes=(\d+)", f"nodes=63 {spec}")[-1])
        verify, draft = ms(batch * (1 + nodes), batch, context), 0.0 if spec == "none" else 1.0 + nodes / 100
        rows.append(asdict(Step(spec, batch, context, nodes, draft, verify, 0.0, 0.0)))
    paced = [asdict(Throughput("none", batch, 0.0, 1.0, ms(batch, batch, 256) + 0.2, 0.0)) for batch in costs.PACED]
    made = costs_of(costs.table_of({"costs": rows, "paced": paced}, "a GPU", ["--parts", "costs"]).as_dict())
    assert made.command == "python -m benchmarks.gpu --parts costs" and made.machine == "a GPU"
    for shape in ((16, 1, 256), (64, 64, 256), (256, 16, 256), (32, 1, 4000)):
        assert made.a_pass(*shape) == pytest.approx(ms(*shape), rel=0.02)
    assert made.a_draft("suffix+eagle3", 15, 1) == pytest.approx(1.15) and made.a_draft("mtp", 63, 1) == 1.63
    assert made.other(1) == pytest.approx(0.2, abs=0.01)


def test_a_body_is_spared_the_layers_that_the_small_model_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    body: Any = SimpleNamespace(order=(0, 1, None, 2, 3), source_fingerprint="small")
    monkeypatch.setattr(tuned, "find", lambda method, fingerprint: {"skip": "1-2"} if fingerprint == "small" else None)
    assert skipping(body) == ["layer_skip:skip=1/3"]  # the idle layer stays: no real model has one
    body.source_fingerprint = "unknown"
    assert skipping(body) == []


def test_what_cannot_be_measured_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, words in (
        (["--drafters", "eagle3", "suffix+eagle3", "nobody=here"], "--drafters suffix+eagle3 nobody=here: of eagle3"),
        (["--json", "nowhere/figures.json"], "--json nowhere/figures.json: there is no such directory"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *line])
        with pytest.raises(SystemExit) as refused:
            command.main()
        assert refused.value.code == 2 and words in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--foreign", "./nobody"])
    with pytest.raises(ModelNotFound, match="nobody"):
        command.main()


def test_a_draft_of_the_bodys_vocabulary_drafts_for_it_as_the_distilled_one_does(tmp_path: Path) -> None:
    small = LLM(tiny_directory(0, layers=8, context=300, characters=True), speculate=None)
    head, settings = new_head(small, "draft_model", torch.arange(97), layers=2)
    teach(head, lesson_of(small, written(small, 4), torch.arange(97), ()), 10)
    place = saved(small, "draft_model", head, settings)
    body = BodyCheckpoint(open_checkpoint(small.model.name), "test", BODY, "cpu", torch.float32)
    how = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    large = LLM(body, speculate=None)
    prompts = written(small, 3)
    texts = [output.token_ids for output in large.generate(prompts, how)]

    def steps(llm: LLM, speculate: str) -> list[int]:
        llm.use(speculate)
        outputs = llm.generate(prompts, how)
        assert [output.token_ids for output in outputs] == texts
        return [output.stats.steps for output in outputs]

    alone, stacked, foreign = companions.drafters(body, place, "/some/model", tmp_path, SMALL)
    wanted = steps(small, f"draft_model:checkpoint={place},depth=4")
    assert steps(large, alone) == steps(large, stacked) == wanted
    assert alone == f"draft_model:model={tmp_path / '1b'}" and stacked == f"cascade:suffix+{alone}"
    assert foreign == "foreign_draft:model=/some/model"
    assert companions.drafters(body, None, "", tmp_path) == []


def test_what_was_measured_outlives_what_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nothing of our own is run any more: the file is written after every part."""
    file, seen = tmp_path / "figures.json", []

    class Broken(command.Run):
        def floor(self) -> None:
            self.note("floor", Floor(1, 4.0, 3700.0))

        def steps(self) -> None:
            seen.append(json.loads(file.read_text()))
            self.note("steps", Step("none", 1, 100, 0, 0.0, 4.5, 0.0, 0.0))
            raise KeyboardInterrupt

    nothing: Any = None
    run = Broken(nothing, nothing, {}, [], 16, list)
    with pytest.raises(KeyboardInterrupt):
        command.measure(run, ["floor", "steps", "peers"], "a title", file)
    assert [list(found) for found in seen] == [["title", "floor"]]
    assert list(json.loads(file.read_text())) == ["title", "floor", "steps"]
    assert "| a round: none | 1 | 100 |" in capsys.readouterr().out


@torch.no_grad()
def test_the_peer_has_the_bodys_logits() -> None:
    shape = replace(BODY, heads=8, kv_heads=4)  # transformers wants the width to be a multiple
    body = BodyCheckpoint(
        open_checkpoint(tiny_directory(0, layers=8, context=300)), "test", shape, "cpu", torch.float32
    )
    theirs = hf_model(body, torch.float32)(torch.tensor([[5, 9, 2, 7, 44, 60, 3]])).logits[0]
    (output,) = LLM(body, speculate=None).generate(
        [[5, 9, 2, 7, 44, 60, 3]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=97)
    )
    for token, found in output.logprobs[0].items():
        assert float(theirs[-1].log_softmax(-1)[token]) == pytest.approx(found.logprob, abs=1e-4)
