"""Joint training: the new model and its drafter fit each other alone, and it is labelled as another model."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.errors import OptionError, SlipstreamError
from slipstream.models.decoder import Decoder
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.train import run as run_module
from slipstream.train.data import ChatData
from slipstream.train.finish import SMALLEST
from slipstream.train.joint.drift import drift
from slipstream.train.joint.head import JointHead
from slipstream.train.joint.merged_model import MergedCheckpoint
from slipstream.train.joint.model import TunedModel, updates_of
from slipstream.train.joint.run import JointSettings, split_settings, train_jointly
from slipstream.train.lessons import Texts
from slipstream.train.run import TrainJob
from slipstream.train.trainer import ProgressSink, Trainer
from tests.chats import order, target, tiny_llm, written
from tests.invoking import invoke
from tests.lessons import lesson_of, new_head

QUIET = ProgressSink()
RANK = JointSettings(rank=4, farthest=0.5)
COURSE = {"steps": 30, "evaluate": 15, "prompts": 8, "answer": 24}


@dataclass(frozen=True)
class Outcome:
    model: Path
    out: Path
    drafter: Trained
    lines: list[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished joint training; not to be written to."""
    lines: list[str] = []
    asked = order("medusa", tmp_path_factory.mktemp("joint") / "drafter", COURSE)
    return Outcome(*train_jointly(asked, RANK, ProgressSink(lines.append)), lines)


def speculate(place: Path) -> dict[str, str]:
    return {"method": "medusa", "checkpoint": str(place)}


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_and_without_its_drafter_the_new_model_gives_the_same_text(made: Outcome, temperature: float) -> None:
    how = SamplingParams(temperature=temperature, max_tokens=40, seed=3)
    prompts = [[5, 6, 7], [40, 2], [90, 11, 12, 13]]
    llm = LLM(made.model, speculate=None)
    plain = [output.token_ids for output in llm.generate(prompts, how)]
    llm.use(speculate(made.out))
    outputs = llm.generate(prompts, how)
    assert [output.token_ids for output in outputs] == plain and llm.engine.draft_faults == 0
    assert sum(output.stats.steps for output in outputs) < sum(map(len, plain)), "something was accepted"


def test_the_checkpoint_is_for_the_new_model_alone(made: Outcome) -> None:
    with pytest.raises(OptionError, match=r"was trained for drafter-model .*this target is another"):
        LLM(target(), speculate=speculate(made.out))
    frozen = made.out.with_name("drafter-frozen")
    with pytest.raises(OptionError, match="this target is another"):
        LLM(made.model, speculate=speculate(frozen))
    LLM(target(), speculate=speculate(frozen))
    assert head_checkpoint.load(made.out).target.fingerprint == LLM(made.model, speculate=None).model.fingerprint


def test_it_is_reported_that_it_is_another_model(made: Outcome) -> None:
    assert made.lines[0].startswith("lossy: --joint changes the target") and "another model" in made.lines[0]
    facts = json.loads((made.model / "joint.json").read_text())["joint"]
    assert facts == head_checkpoint.load(made.out).provenance["joint"] == made.drafter.provenance["joint"]
    assert facts["lossy"] is True and facts["settings"]["rank"] == 4
    assert facts["original"]["fingerprint"] == tiny_llm().model.fingerprint != facts["model"]["fingerprint"]
    told = [line for line in made.lines if line.startswith("lossy: drafter-model is another model than target")]
    assert len(told) == 1 and f"{facts['drift']['kl']:.4f} nats" in told[0]
    text = (made.model / "README.txt").read_text()
    assert text.startswith("This is NOT target.") and f"{facts['drift']['kl']:.6f} nats" in text
    for steps in facts["tokens_per_step"].values():
        assert f"{steps:.3f}" in text
    for file in (made.model / "joint.json", made.model / "README.txt", made.out / "drafter.json"):
        assert str(made.out.parent) not in file.read_text(), "nothing about this machine"


def test_the_figures_are_those_of_the_model_on_disk(made: Outcome) -> None:
    facts = made.drafter.provenance["joint"]
    texts = Texts(ChatData(written()), made.drafter.provenance["arguments"]["longest"])
    found = drift(tiny_llm().model, LLM(made.model, speculate=None).model, texts)
    assert facts["drift"] == pytest.approx(vars(found), abs=1e-9)
    assert found.kl > 0 and 0 < found.changed < 0.5 and found.positions > 1000
    figures, now = made.drafter.figures, facts["tokens_per_step"]["model"]
    assert figures["stored"][SMALLEST.name] == pytest.approx(now)
    assert len(figures["accuracies"]) == 5, "the static tree has its facts"


@pytest.mark.parametrize("size", [0.0, 0.01, 0.05])
def test_drift_is_nothing_without_updates_and_grows_with_them(size: float) -> None:
    original, source = tiny_llm().model, HFCheckpoint(target())
    texts = Texts(ChatData(written()), 64)

    def moved(size: float) -> Any:
        torch.manual_seed(1)
        tuned = TunedModel(source, torch.float32, "cpu", rank=2)
        state = {name: size * torch.randn_like(weight) for name, weight in tuned.state_dict().items()}
        merged = MergedCheckpoint(source, updates_of(state), torch.float32)
        return drift(original, Decoder(merged, torch.float32, "cpu"), texts)

    less, more = moved(size), moved(2 * size + 0.1)
    assert (less.kl == less.changed == 0.0) == (size == 0.0)
    assert less.kl < more.kl and less.changed < more.changed


# -- how it learns ----------------------------------------------------------------------------------------------------


def test_at_the_beginning_the_losses_are_those_of_the_head_alone() -> None:
    llm, vocab = tiny_llm(), torch.arange(0, 97, 2)
    texts = torch.randint(97, (3, 140), generator=torch.Generator().manual_seed(1)).tolist()
    head, _ = new_head(llm, "medusa", vocab)
    lesson = lesson_of(llm, texts, vocab, (1,))
    alone = head.losses(lesson)
    joint = JointHead(head, TunedModel(HFCheckpoint(target()), torch.float32, "cpu", rank=2), weight=0.5)
    together = joint.losses(lesson)
    torch.testing.assert_close(together.total, 0.5 * alone.total, atol=1e-5, rtol=1e-5)
    assert torch.equal(together.accuracy, alone.accuracy)


def test_only_the_head_is_rounded_in_the_end() -> None:
    """Its file has few bits; the target's updates are merged into a model that has all of them."""
    head, _ = new_head(tiny_llm(), "medusa", torch.arange(97))
    joint = JointHead(head, TunedModel(HFCheckpoint(target()), torch.float32, "cpu", rank=2), weight=0.5)
    rounded, own = ({id(w) for w in part} for part in (joint.stored_matrices(), head.parameters()))
    assert rounded == {id(w) for w in head.stored_matrices()} <= own
    assert any(w.ndim == 2 and id(w) not in rounded for w in joint.parameters()), "the updates"


def test_the_original_holds_the_target_back() -> None:
    """Where the head's losses count nothing, an update that was made by force is learnt away."""
    llm, vocab = tiny_llm(), torch.arange(97)
    texts = torch.randint(97, (3, 140), generator=torch.Generator().manual_seed(1)).tolist()
    lesson = lesson_of(llm, texts, vocab, (1,))
    torch.manual_seed(0)
    tuned = TunedModel(HFCheckpoint(target()), torch.float32, "cpu", rank=2)
    joint = JointHead(new_head(llm, "medusa", vocab)[0], tuned, weight=0.0)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if name.endswith("leave"):
                weight.add_(0.3 * torch.randn_like(weight))
    optimiser = torch.optim.AdamW(tuned.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = joint.losses(lesson).total
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.05 and losses[-1] < 0.3 * losses[0]


def test_any_method_that_reads_the_target_can_be_trained_so(tmp_path: Path) -> None:
    asked = order("eagle3", tmp_path / "drafter", {"steps": 8}, settings={"vocabulary": 80, "unroll": 2})
    model, out, _ = train_jointly(asked, RANK, QUIET)
    llm = LLM(model, speculate={"method": "eagle3", "checkpoint": str(out)})
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    assert llm.engine.draft_faults == 0


def test_sixteen_bits_of_the_target_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the target in bfloat16, the updates in float32."""
    monkeypatch.setattr(run_module, "_require_wide", lambda order: None)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its gradients crash on some CPUs
    asked = order("medusa", tmp_path / "drafter", {"steps": 12}, dtype="bfloat16")
    model, _, drafter = train_jointly(asked, RANK, QUIET)
    stored = load_file(model / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert 0 < drafter.provenance["joint"]["drift"]["kl"] < 1


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_trees")
def test_an_interrupted_one_goes_on_as_if_nothing_had_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course = {"steps": 10, "evaluate": 5, "save": 2}
    asked, step = order("medusa", tmp_path / "stopped", course), Trainer._step

    def breaks(self: Trainer) -> None:
        if isinstance(self.head, JointHead) and self.record.step == 5:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", breaks)
        with pytest.raises(KeyboardInterrupt):
            train_jointly(asked, RANK, QUIET)
    assert not (tmp_path / "stopped-model").exists() and (tmp_path / "stopped-frozen" / "drafter.json").exists()
    with pytest.raises(OptionError, match="joint rank=4, but now it is 5"):
        train_jointly(asked, replace(RANK, rank=5), QUIET)
    lines: list[str] = []
    train_jointly(asked, RANK, ProgressSink(lines.append))
    assert any("stopped-frozen has been trained already" in line for line in lines) and "continuing at step 4" in lines
    train_jointly(order("medusa", tmp_path / "whole", course), RANK, QUIET)
    for names in (("stopped-model", "whole-model"), ("stopped", "whole")):
        ours, theirs = (next((tmp_path / name).glob("*.safetensors")) for name in names)
        one, other = load_file(ours), load_file(theirs)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_was_made_is_not_made_again(made: Outcome, tmp_path: Path) -> None:
    lines: list[str] = []
    place = tmp_path / "drafter"
    for name in ("drafter", "drafter-frozen", "drafter-model"):
        shutil.copytree(made.out.with_name(name), tmp_path / name)
    again = train_jointly(order("medusa", place, COURSE), RANK, ProgressSink(lines.append))
    assert again[2].figures == made.drafter.figures and "trained already" in lines[-1]
    shutil.rmtree(tmp_path / "drafter-model")
    with pytest.raises(OptionError, match=r"was made for 'drafter-model', which is not at .*--restart"):
        train_jointly(order("medusa", place, COURSE), RANK, QUIET)


def test_it_starts_from_a_checkpoint_without_warming_up(made: Outcome, tmp_path: Path) -> None:
    lines: list[str] = []
    start, asked = made.out.with_name("drafter-frozen"), order("medusa", tmp_path / "drafter", {"steps": 6})
    model, _, drafter = train_jointly(
        replace(asked, init=str(start)), RANK, ProgressSink(lines.append), tmp_path / "elsewhere"
    )
    assert model == tmp_path / "elsewhere" and (model / "README.txt").exists()
    assert not (tmp_path / "drafter-frozen").exists() and drafter.provenance["training"]["steps"] == 6


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_any_work(tmp_path: Path) -> None:
    def refused(words: str, asked: TrainJob, model_out: Path | None = None) -> None:
        with pytest.raises(OptionError, match=words):
            train_jointly(asked, RANK, QUIET, model_out)
        assert not list(tmp_path.glob("drafter*"))

    asked = order("medusa", tmp_path / "drafter")
    refused("needs a directory for it", replace(asked, out=None))
    refused("suffix cannot be trained", replace(asked, method="suffix"))
    refused("draft_model reads nothing of the target", replace(asked, method="draft_model"))
    refused("cannot hold both the new model and the checkpoint", asked, tmp_path / "drafter")
    refused("cannot hold both the new model and the original", asked, target())
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    refused("exists and was not made by a joint training", asked, tmp_path / "photos")
    refused("cannot write", asked, tmp_path / "photos" / "cat.jpg" / "model")
    refused("steps=1 is out of range", replace(asked, config=replace(asked.config, steps=1)))


@pytest.mark.parametrize(
    "setting", ["rank=0", "tuned_layers=-1", "draft_weight=-0.1", "farthest=0", "warm_up=1", "warm_up=0"]
)
def test_settings_out_of_range_are_refused(setting: str) -> None:
    name, _, value = setting.partition("=")
    with pytest.raises(OptionError, match=f"{name}=.* is out of range"):
        split_settings("medusa", {name: value})


def test_a_model_that_cannot_be_distinguished_from_the_original_is_not_written(tmp_path: Path) -> None:
    asked = order("medusa", tmp_path / "drafter", {"rate": 1e-12})
    with pytest.raises(SlipstreamError, match="too small to distinguish the new model from it"):
        train_jointly(asked, RANK, QUIET)
    assert not (tmp_path / "drafter-model").exists() and not list(tmp_path.glob(".drafter-model*"))


def test_weights_that_went_too_far_are_not_taken_however_well_they_draft(made: Outcome, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(SlipstreamError, match=r"nothing better in 21 steps within 0\.001 nats of the original"):
        train_jointly(
            order("medusa", tmp_path / "drafter", COURSE), replace(RANK, farthest=1e-3), ProgressSink(lines.append)
        )
    assert sum("too far, rejected" in line for line in lines) == 2, "all but the beginning"
    assert not (tmp_path / "drafter-model").exists()
    gone = made.drafter.provenance["joint"]  # the same course with more leave to go
    assert gone["drift"]["kl"] > 1e-3 and gone["tokens_per_step"]["model"] > gone["tokens_per_step"]["original"]


# -- the command line -------------------------------------------------------------------------------------------------

SHORT = [
    "--steps=16",
    "--evaluate=16",
    "--tokens=512",
    "--answer=6",
    "--set=vocabulary=80",
    "--set=farthest=0.5",
    "--rate=0.005",
]


def call(*arguments: object) -> Any:
    places = ["-m", str(target()), "--data", str(written()), "--examined=2"]
    return invoke("train", "medusa", *places, *SHORT, *map(str, arguments))


def test_the_command_says_what_it_made_and_how_to_use_it(tmp_path: Path) -> None:
    result = call("--joint", "-o", tmp_path / "drafter", "--set", "rank=2")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("lossy: --joint changes the target")
    assert "lossy: drafter-model is another model than target" in result.stdout
    assert f"run -m {tmp_path / 'drafter-model'} --speculate medusa:checkpoint={tmp_path / 'drafter'}" in result.stdout
    again = call("--joint", "-o", tmp_path / "drafter", "--set", "rank=2", "--json")
    figures = json.loads(again.stdout)
    assert figures["model"] == str(tmp_path / "drafter-model") and figures["joint"]["lossy"] is True


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    cases = {
        "needs a directory for it": ["--joint"],
        "--model-out is for": ["--model-out", tmp_path / "x", "-o", tmp_path / "drafter"],
        "unknown option of drafter 'medusa': 'farthest'": ["-o", tmp_path / "drafter"],
        "rank='x' is not int": ["--joint", "--set", "rank=x", "-o", tmp_path / "drafter"],
    }
    for words, arguments in cases.items():
        result = call(*arguments)
        assert result.exit_code == 2 and words in result.stderr
        assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) <= 2


def test_it_runs_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--model", target(), "--data", written(), "--out", tmp_path / "drafter", "--model-out", tmp_path / "new"]
    monkeypatch.setattr(sys, "argv", ["train", "medusa", *map(str, places), "--joint", "--prompts=2", *SHORT])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("slipstream.train", run_name="__main__")
    assert "lossy: new is another model than target" in capsys.readouterr().out
    assert (tmp_path / "new" / "README.txt").exists()
