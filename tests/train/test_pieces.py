"""A training in pieces: what the first one chose stays, data may come in, and the best weights of all are kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import DESCRIPTION
from slipstream.errors import OptionError
from slipstream.train import state
from slipstream.train import trainer as trainer_module
from slipstream.train.data import ChatData, ChatWriter
from slipstream.train.joint.run import JointSettings, train_jointly
from slipstream.train.run import TrainJob, train
from slipstream.train.state import State
from slipstream.train.trainer import ProgressSink, Trainer
from tests.chats import VOCAB_SIZE, order, tiny_llm, written

QUIET = ProgressSink()
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"vocabulary": 60, "unroll": 3},
    "parallel": {"vocabulary": 60, "block": 4, "inject": True, "confidence": True, "taps": (0, 1), "loss": "lk"},
}


def piece(method: str, out: Path, course: dict[str, Any] | None = None, **changes: Any) -> TrainJob:
    return order(method, out, course, **{"settings": SETTINGS[method], "piece": True, **changes})


def more(place: Path, seed: int, count: int = 40) -> Path:
    """Data of the same target, in shards of 20 chats; what is there already stays."""
    chooser, llm = random.Random(seed), tiny_llm()
    with ChatWriter(place, fingerprint=llm.model.fingerprint, vocab_size=VOCAB_SIZE, model="tiny") as writer:
        for _ in range(count // 20):
            for _ in range(20):
                writer.append([chooser.randrange(VOCAB_SIZE) for _ in range(30)], 8)
            writer.commit(20)
    return place


def left(out: Path) -> State:
    found = state.load(out, None)
    assert found is not None
    return found


@pytest.mark.parametrize("method", SETTINGS)
def test_three_pieces_make_one_training(method: str, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    train(piece(method, out), QUIET)
    first = left(out)
    assert not (out / DESCRIPTION).exists() and first.record.step == 6
    added = more(tmp_path / "added", 1)
    # Settings need not be said again; the new data may be named first.
    longer = piece(method, out, {"steps": 4}, resume=True, data=(added, written()), settings={})
    train(longer, QUIET)
    more(added, 2, 20)  # and the folder grows
    second = left(out)
    assert second.record.step == 10 and second.record.epoch > first.record.epoch
    assert second.record.shards[: len(first.record.shards)] == first.record.shards
    for name in ("vocab", "held_out"):
        assert torch.equal(first.fixed[name], second.fixed[name])
    place, drafter = train(replace(longer, piece=False), QUIET)
    record = drafter.provenance["training"]
    assert place == out and record["steps"] == 14 and drafter.provenance["data"]["counts"]["kept"] == 180
    found = head_checkpoint.load(out)
    assert {name: found.settings[name] for name in SETTINGS[method] if name != "taps"} == {
        name: value for name, value in SETTINGS[method].items() if name != "taps"
    }
    assert torch.equal(found.vocab, first.fixed["vocab"])
    assert len(found.vocab) == 60 and found.figures["tokens_per_step"] >= 1.0


def test_the_best_weights_of_all_pieces_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    train(piece("eagle3", out, {"steps": 20, "evaluate": 20}), QUIET)
    good = left(out)
    ruinous = piece("eagle3", out, {"steps": 10, "evaluate": 5, "rate": 3.0}, resume=True)
    train(ruinous, QUIET)
    ruined = left(out)
    assert ruined.record.best_step == 20 < ruined.record.step == 30
    assert ruined.record.marks[-1]["tokens_per_step"] < ruined.record.best == good.record.best
    assert all(torch.equal(weight, ruined.best[name]) for name, weight in good.best.items())
    _, drafter = train(replace(ruinous, piece=False), QUIET)
    assert drafter.provenance["training"]["best_step"] == 20


def test_patience_counts_from_the_piece(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    course = {"steps": 8, "evaluate": 1, "rate": 3.0, "patience": 2}
    train(piece("eagle3", out, {"steps": 8, "evaluate": 8}), QUIET)
    train(piece("eagle3", out, course, resume=True), QUIET)
    stopped = left(out).record.step
    assert 8 < stopped < 16
    train(piece("eagle3", out, {**course, "seed": 1}, resume=True), QUIET)
    assert left(out).record.step > stopped


def test_a_killed_piece_resumes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for killed in (False, True):
        out = tmp_path / f"drafter-{killed}"
        train(piece("eagle3", out), QUIET)
        job = piece("eagle3", out, {"steps": 8, "rate": 4e-3}, resume=True)
        if killed:
            with monkeypatch.context() as patch:
                patch.setattr(Trainer, "_examine", _dying(Trainer._examine, 11))
                with pytest.raises(KeyboardInterrupt):
                    train(job, QUIET)
            assert left(out).record.step == 10
        train(job, QUIET)
        ends.append(left(out))
    assert ends[0].record.step == ends[1].record.step == 14
    assert all(torch.equal(weight, ends[1].weights[name]) for name, weight in ends[0].weights.items())


def _dying(healthy: Any, step: int) -> Any:
    def examine(trainer: Trainer) -> None:
        if trainer.record.step > step:
            raise KeyboardInterrupt
        healthy(trainer)

    return examine


def test_the_rate_stays_up_until_the_last_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    healthy = trainer_module.rate
    monkeypatch.setattr(trainer_module, "rate", lambda *given: seen.append(healthy(*given)) or seen[-1])  # type: ignore[func-returns-value]
    out = tmp_path / "drafter"
    train(piece("eagle3", out), QUIET)
    train(piece("eagle3", out, resume=True, piece=False), QUIET)
    assert seen[:6] == [5e-3] * 6
    assert seen[6] == 5e-3 and seen[11] < 0.1 * seen[6] and seen[6:] == sorted(seen[6:], reverse=True)


def test_data_that_is_gone_is_refused(tmp_path: Path) -> None:
    out, added = tmp_path / "drafter", more(tmp_path / "added", 1)
    train(piece("eagle3", out, data=(written(), added)), QUIET)
    with pytest.raises(OptionError, match="2 of the 3 shards"):
        train(piece("eagle3", out, resume=True), QUIET)


def test_shards_are_known_wherever_they_lie(tmp_path: Path) -> None:
    one, other = more(tmp_path / "one", 1), more(tmp_path / "other", 2)
    before, after = ChatData(one, other), ChatData(other, one)
    assert len(set(before.shards)) == 4 and before.shards != after.shards
    after.begin_with(before.shards[:3])
    assert after.shards == before.shards
    assert [after[i].tokens.tolist() for i in range(len(after))] == [before[i].tokens.tolist() for i in range(80)]


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    with pytest.raises(OptionError, match="no state to resume"):
        train(piece("eagle3", out, resume=True), QUIET)
    train(piece("eagle3", out), QUIET)
    with pytest.raises(OptionError, match="set unroll=3, but now it is 2"):
        train(piece("eagle3", out, resume=True, settings={"unroll": 2}), QUIET)
    with pytest.raises(OptionError, match="method='eagle3'"):
        train(piece("parallel", out, resume=True, settings={}), QUIET)
    for other in ({"restart": True}, {"init": "eagle3"}):
        with pytest.raises(OptionError, match="not both"):
            piece("eagle3", out, resume=True, **other)
    with pytest.raises(OptionError, match="in one piece"):
        train_jointly(piece("eagle3", tmp_path / "joint"), JointSettings(), QUIET)
