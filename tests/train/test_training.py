"""Training: every method that learns gets better by real decoding, and an interrupted training loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.drafters.heads import head_checkpoint, weight_codec
from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.drafters.heads.head_drafter import HeadDrafter
from slipstream.drafters.registry import drafter_class
from slipstream.errors import CorruptFile, NotEnoughMemory, OptionError, SlipstreamError
from slipstream.train import finish as finish_module
from slipstream.train import run as run_module
from slipstream.train import state
from slipstream.train.config import TrainConfig
from slipstream.train.evaluate import Examiner
from slipstream.train.run import TrainJob, learned_methods, train
from slipstream.train.state import Record, State
from slipstream.train.trainer import ProgressSink, Trainer
from tests.chats import order, target, tiny_llm, written

ROOT = Path(__file__).parents[2]
QUIET = ProgressSink()
# A student of as many layers as the tiny target has would begin as its copy.
SETTINGS: dict[str, dict[str, Any]] = {"draft_model": {"layers": 1}, "eagle3": {"unroll": 3}}


def report(place: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((place / "report.json").read_text())
    return content


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the end one form of storage (every bit of the weights) and two trees are examined, not three and six."""
    monkeypatch.setattr(finish_module, "FORMS", finish_module.FORMS[-1:])
    monkeypatch.setattr(finish_module, "TREES", finish_module.TREES[:1])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A finished training; not to be written to."""
    place = tmp_path_factory.mktemp("done") / "drafter"
    return train(order("eagle3", place, {"steps": 40, "evaluate": 20, "answer": 12}), QUIET)


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_sixteen_bits_of_the_target_are_enough(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the target in bfloat16, the products of the head too, its weights in float32.

    A head with layers and one without. The trainer alone handles types, and the other heads are made of such layers.
    """
    monkeypatch.setattr(run_module, "_require_wide", lambda order: None)
    settings = {"vocabulary": 80, **SETTINGS.get(method, {})}
    asked = order(method, tmp_path / method, {"steps": 12, "tokens": 256}, settings=settings, dtype="bfloat16")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its gradients crash on some CPUs
    place, _ = train(asked, QUIET)
    losses = [entry["loss"] for entry in report(place)["record"]["losses"]]
    assert losses[-1] < losses[0]
    assert report(place)["record"]["best"] >= 1.0


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("method", learned_methods())
def test_sixty_steps_raise_the_tokens_per_step(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From random weights: the layers of this target are so similar that some heads would start as good as they end."""
    monkeypatch.setattr(drafter_class(method).head_type, "begin", lambda head: None)  # type: ignore[attr-defined]
    course = {"steps": 60, "evaluate": 60, "save": 60, "prompts": 8, "answer": 24}
    settings = {"vocabulary": 80, **SETTINGS.get(method, {})}
    one_step = {**course, "steps": 1, "rate": 1e-9}
    _, untaught = train(order(method, tmp_path / "untaught", one_step, settings=settings), QUIET)
    place, drafter = train(order(method, tmp_path / method, course, settings=settings), QUIET)
    assert drafter.figures["tokens_per_step"] > 1.15 * untaught.figures["tokens_per_step"]
    kind = drafter_class(method)
    assert issubclass(kind, HeadDrafter)
    plain, asked = tiny_llm(), [[5, 6, 7], [40, 2]]
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    wanted = [output.token_ids for output in plain.generate(asked, greedy)]
    drafting = LLM(target(), speculate={"method": method, "checkpoint": str(place)})
    assert [output.token_ids for output in drafting.generate(asked, greedy)] == wanted
    assert drafting.engine.draft_faults == 0


def test_a_checkpoint_says_what_it_is_and_how_it_was_made(done: tuple[Path, Trained]) -> None:
    place, drafter = done
    found = head_checkpoint.load(place)
    assert sorted(entry.name for entry in place.iterdir()) == [
        *("drafter.json", "report.html", "report.json", "weights.safetensors")
    ]
    assert len({entry.stat().st_mode for entry in place.iterdir()}) == 1, "whoever may read one file may read all"
    assert found.target.fingerprint == tiny_llm().model.fingerprint
    assert len(found.vocab) == 80 and found.settings["vocabulary"] == 80
    assert found.provenance["arguments"]["steps"] == 40
    assert found.provenance["data"]["model"] == "tiny"
    figures = found.figures
    assert figures == drafter.figures
    assert set(figures["nodes"]) == {"8", "16", "32", "64"} and figures["chain"]["tokens_per_step"] >= 1.0
    least = (1 - finish_module.LOSS) * figures["stored"]["float32"]
    assert figures["stored"][figures["stored_as"]] >= least
    record = report(place)["record"]
    assert record["step"] == 40 and [mark["step"] for mark in record["marks"]] == [20, 40]
    assert str(place.parent) not in (place / "drafter.json").read_text(), "nothing about this machine"


def test_the_page_of_the_report_is_self_contained(done: tuple[Path, Trained]) -> None:
    page = (done[0] / "report.html").read_text()
    pictures = [f"<svg{part.split('</svg>')[0]}</svg>" for part in page.split("<svg")[1:]]
    assert len(pictures) == 4
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "depth 1" in page and "src=" not in page and "<script" not in page and "<link" not in page


@pytest.mark.usefixtures("same_trees")
def test_smaller_storage_is_taken_only_where_it_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = weight_codec.packed

    def coarse(weights: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
        """Whatever is smaller than bfloat16 has signs alone."""
        return {
            name: weight.sign() if weight.dtype == torch.int8 else weight for name, weight in packed(weights, 8).items()
        }

    monkeypatch.setattr(head_checkpoint, "packed", coarse)
    course = {"steps": 40, "evaluate": 40, "prompts": 8, "answer": 24}
    _, drafter = train(order("eagle3", tmp_path / "drafter", course), QUIET)
    found = drafter.figures["stored"]
    assert found["6 bits"] == found["int8"] < 0.99 * found["float32"]
    assert drafter.figures["stored_as"] in ("bfloat16", "float32")


def test_an_examination_finds_nothing_of_the_one_before(done: tuple[Path, Trained]) -> None:
    """Pages that are found in the cache would come without the hidden states that the head wants."""
    prompts = [[(7 * number + 3 * place * place) % 97 for place in range(250)] for number in range(8)]
    examiner = Examiner(tiny_llm(), "eagle3", prompts, 24)
    first = examiner.score(done[0])
    assert first.tokens_per_step > 1.2 and first == examiner.score(done[0])


# -- interruptions ----------------------------------------------------------------------------------------------------

LONGER = {"steps": 30, "evaluate": 10, "save": 2}


def as_command(order: TrainJob) -> list[str]:
    """The job as arguments of `python -m slipstream.train`."""
    given = [f"--{name}={value}" for name, value in vars(order.config).items()]
    given += [f"--set={name}={value}" for name, value in order.settings.items()]
    places = [f"--model={order.model}", f"--data={order.data[0]}", f"--out={order.out}", "--device=cpu"]
    return [sys.executable, "-m", "slipstream.train", order.method, *places, *given]


@pytest.mark.usefixtures("briefly")
def test_a_killed_training_resumes_to_the_same_weights(tmp_path: Path) -> None:
    killed, whole = order("eagle3", tmp_path / "killed", LONGER), order("eagle3", tmp_path / "whole", LONGER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(as_command(killed), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not any((tmp_path / "killed").glob("state-0000000[1-9]*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "killed" / "drafter.json").exists()
    lines: list[str] = []
    train(killed, ProgressSink(lines.append))
    assert any("continuing at step" in line for line in lines)
    train(whole, QUIET)
    ours, theirs = (load_file(place / "weights.safetensors") for place in (killed.out, whole.out) if place)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    records = [report(place)["record"] for place in (tmp_path / "killed", tmp_path / "whole")]
    assert records[0]["losses"] == records[1]["losses"]
    assert [m["tokens_per_step"] for m in records[0]["marks"]] == [m["tokens_per_step"] for m in records[1]["marks"]]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """A training that was interrupted after its safe point at step 4."""
    asked = order("eagle3", tmp_path / "drafter")
    step = Trainer._step

    def breaks(self: Trainer) -> None:
        if self.record.step == 5:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", breaks)
        with pytest.raises(KeyboardInterrupt):
            train(asked, QUIET)
    return asked


def test_other_arguments_are_refused_and_restart_starts_again(stopped: TrainJob) -> None:
    assert stopped.out is not None
    assert [place.name for place in stopped.out.iterdir()] == ["state-000000004"]
    other = replace(stopped, config=replace(stopped.config, rate=1e-4))
    with pytest.raises(OptionError, match=r"rate=0\.005, but now it is 0\.0001.*--restart"):
        train(other, QUIET)
    with pytest.raises(OptionError, match="set unroll=6, but now it is 2"):
        train(replace(stopped, settings={"vocabulary": 80, "unroll": 2}), QUIET)
    lines: list[str] = []
    train(replace(other, restart=True), ProgressSink(lines.append))
    assert not any("continuing" in line for line in lines)
    with pytest.raises(OptionError, match="rate"):  # a finished one is not trained over either
        train(stopped, QUIET)
    train(other, ProgressSink(lines.append))
    assert "trained already" in lines[-1]


def test_half_a_state_is_none_and_a_corrupt_one_is_reported(stopped: TrainJob) -> None:
    assert stopped.out is not None
    (stopped.out / ".state-77").mkdir()  # a process was killed while writing it
    whole = stopped.out / "state-000000004"
    content = (whole / "tensors.safetensors").read_bytes()
    (whole / "tensors.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFile, match=r"state-000000004 cannot be read.*--restart"):
        train(stopped, QUIET)
    (whole / "tensors.safetensors").write_bytes(content)
    assert train(stopped, QUIET)[1].provenance["training"]["steps"] == 6


def test_the_old_state_goes_only_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(step: int) -> State:
        return State(Record(step=step), {"w": torch.ones(2)}, {}, {})

    state.save(tmp_path, at(1), {"seed": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            state.save(tmp_path, at(2), {"seed": 1})
    found = state.load(tmp_path, {"seed": 1})
    assert found is not None and found.record.step == 1
    state.save(tmp_path, at(3), {"seed": 1})
    assert [place.name for place in tmp_path.glob("state-*")] == ["state-000000003"]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_it_and_the_batch_is_kept(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"the loss was (nan|inf) at step (\d+).*bad-batch-\d+\.safetensors"):
        train(order("eagle3", tmp_path / "drafter", {"rate": 1e36}), QUIET)
    (file,) = (tmp_path / "drafter").glob("bad-batch-*")
    kept = load_file(file)
    assert kept["tokens"].shape[0] == len(kept["lengths"]) == len(kept["prompt_lens"])
    train(order("eagle3", tmp_path / "drafter", restart=True), QUIET)  # what it left is no obstacle
    assert not file.exists()


def test_a_batch_too_large_for_the_memory_is_reported_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "_learn", full)
    with pytest.raises(NotEnoughMemory, match="--tokens 256"):
        train(order("eagle3", tmp_path / "drafter"), QUIET)


def test_what_cannot_be_trained_is_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    with pytest.raises(OptionError, match=r"suffix cannot be trained.*eagle3"):
        train(order("suffix", out), QUIET)
    with pytest.raises(OptionError, match=r"unknown drafter 'eagle4'.*eagle3"):
        train(order("eagle4", out), QUIET)
    with pytest.raises(OptionError, match=r"unknown option of drafter 'eagle3': 'unrol'.*unroll"):
        train(order("eagle3", out, settings={"unrol": "3"}), QUIET)
    with pytest.raises(OptionError, match="unroll=0 is out of range"):
        train(order("eagle3", out, settings={"unroll": "0"}), QUIET)
    with pytest.raises(OptionError, match="trained in float32"):
        train(order("eagle3", out, dtype="bfloat16", device="cpu"), QUIET)
    with pytest.raises(OptionError, match="no data set"):
        train(order("eagle3", out, data=(tmp_path / "nothing",)), QUIET)
    with pytest.raises(OptionError, match="too few to train on"):
        train(order("eagle3", out, {"longest": 2}), QUIET)
    assert not (out / "drafter.json").exists()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(OptionError, match=r"has 'cat\.jpg', which is not from a training"):
        train(order("eagle3", tmp_path / "photos"), QUIET)
    assert (tmp_path / "photos" / "cat.jpg").exists()
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file"):
        train(order("eagle3", tmp_path / "file"), QUIET)


def test_data_of_another_target_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(written(), other)
    header = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps({**header, "fingerprint": "0123456789abcdef"}))
    with pytest.raises(OptionError, match=r"was written by tiny \(0123456789abcdef\).*slipstream synth"):
        train(order("eagle3", tmp_path / "drafter", data=(other,)), QUIET)


@pytest.mark.usefixtures("briefly")  # all bits of the first weights: in fewer it may start worse than they ended
def test_training_starts_from_a_checkpoint(tmp_path: Path) -> None:
    place, _ = train(order("eagle3", tmp_path / "first"), QUIET)
    out, drafter = train(order("eagle3", tmp_path / "more", init=str(place), settings={}), QUIET)
    start, own = head_checkpoint.load(place), head_checkpoint.load(out)
    assert torch.equal(start.vocab, own.vocab) and start.settings == own.settings
    ours, theirs = (report(folder)["record"]["marks"] for folder in (out, place))
    assert ours[0]["step"] == 0 and ours[0]["tokens_per_step"] > 0.9 * theirs[-1]["tokens_per_step"], "where it ended"
    with pytest.raises(OptionError, match="unroll=6, which cannot become 2"):
        train(order("eagle3", tmp_path / "no", init=str(place), settings={"unroll": "2"}), QUIET)
    with pytest.raises(OptionError, match="'eagle3', not 'medusa'"):
        train(order("medusa", tmp_path / "no", init=str(place), settings={}), QUIET)
    with pytest.raises(OptionError, match="no eagle3 drafter has been trained for this target"):
        train(order("eagle3", tmp_path / "no", init="eagle3", settings={}), QUIET)
    description = json.loads((place / "drafter.json").read_text())
    assert description["provenance"]["arguments"]["init"] == "" and drafter.provenance["arguments"]["init"]


# -- when it ends -----------------------------------------------------------------------------------------------------


def test_it_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    # A rate at which nothing is learnt that shows: the first examination stays the best but for ties.
    course = {"steps": 500, "evaluate": 2, "patience": 2, "rate": 0.5, "save": 100}
    _, drafter = train(order("eagle3", tmp_path / "drafter", course), QUIET)
    training = drafter.provenance["training"]
    assert training["steps"] < 500 and training["steps"] == training["best_step"] + 4


def test_minutes_are_kept(tmp_path: Path) -> None:
    course = {"steps": 0, "minutes": 0.1, "evaluate": 0}
    began = time.monotonic()
    place, _ = train(order("eagle3", tmp_path / "drafter", course), QUIET)
    record = report(place)["record"]
    assert record["step"] > 5 and 60 * 0.1 * 0.6 < record["seconds"] < 60 * 0.1 + 5
    assert 2 <= len(record["marks"]) <= 23
    assert time.monotonic() - began < 60


def test_a_course_is_steps_or_minutes() -> None:
    assert TrainConfig().on("cpu").minutes == 10 and TrainConfig(steps=5).on("cuda").tokens == 8192
    with pytest.raises(OptionError, match="steps=5 or minutes=1"):
        TrainConfig(steps=5, minutes=1)
    with pytest.raises(OptionError, match="rate=0"):
        TrainConfig(rate=0)
