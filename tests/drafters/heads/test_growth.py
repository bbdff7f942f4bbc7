"""A training that continues a checkpoint may have more draft tokens, or more layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Head
from slipstream.drafters.heads.head_drafter import frame_of, make_head
from slipstream.errors import OptionError
from slipstream.llm import LLM
from slipstream.train.run import learned_class, learned_methods, train
from slipstream.train.trainer import ProgressSink
from tests.chats import order, tiny_llm

QUIET = ProgressSink()
TEXT = torch.tensor([[5, 17, 3, 64, 9, 31, 2, 40]])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


def head_of(llm: LLM, method: str, settings: dict[str, Any], vocab: torch.Tensor) -> Head:
    torch.manual_seed(3)
    return make_head(learned_class(method), settings, frame_of(llm.target, vocab))


@pytest.mark.parametrize("method", learned_methods())
@pytest.mark.parametrize("own_rows", [False, True])
def test_what_was_learnt_of_a_token_stays_with_it(llm: LLM, method: str, own_rows: bool) -> None:
    settings: dict[str, Any] = {"own_rows": True} if own_rows else {}
    if own_rows and not hasattr(learned_class(method).settings_type(), "own_rows"):
        pytest.skip("rows of its own are not for this method")
    few, more = torch.arange(0, 60, 2), torch.arange(60)
    former = head_of(llm, method, {**settings, "vocabulary": 30}, few)
    with torch.no_grad():
        for weight in former.parameters():
            weight.normal_()
    grown = head_of(llm, method, {**settings, "vocabulary": 60}, more)
    before = {name: weight.clone() for name, weight in grown.state_dict().items()}
    grown.continue_from(former.state_dict(), few)
    for name, weight in grown.state_dict().items():
        learnt = former.state_dict()[name]
        if name not in grown.by_token:
            assert torch.equal(weight, learnt), name
            continue
        blocks, old, begun = (w.unflatten(0, (-1, n)) for w, n in ((weight, 60), (learnt, 30), (before[name], 60)))
        assert torch.equal(blocks[:, few], old), name
        assert torch.equal(blocks[:, few + 1], begun[:, few + 1]), f"{name}: new tokens begin as in any training"


@pytest.mark.parametrize(("few", "many"), [(1, 2), (2, 3), (2, 5), (3, 4)])
def test_new_layers_add_nothing_at_first(llm: LLM, few: int, many: int) -> None:
    vocab = torch.arange(60)
    former = head_of(llm, "draft_model", {"layers": few, "vocabulary": 60}, vocab)
    with torch.no_grad():
        for weight in former.parameters():
            weight.normal_(std=0.1)
    grown = head_of(llm, "draft_model", {"layers": many, "vocabulary": 60}, vocab)
    grown.begin()
    grown.continue_from(former.state_dict(), vocab)
    torch.testing.assert_close(grown.judged(TEXT), former.judged(TEXT), rtol=0, atol=1e-6)  # type: ignore[operator]


def test_a_training_goes_on_with_more_tokens_and_layers(tmp_path: Path) -> None:
    first, _ = train(order("draft_model", tmp_path / "first", settings={"vocabulary": 60, "layers": 1}), QUIET)
    asked = order("draft_model", tmp_path / "more", init=str(first), settings={"vocabulary": "90", "layers": "2"})
    place, _ = train(asked, QUIET)
    start, own = head_checkpoint.load(first), head_checkpoint.load(place)
    assert own.settings == {**start.settings, "vocabulary": 90, "layers": 2}
    assert len(own.vocab) == 90 and set(start.vocab.tolist()) < set(own.vocab.tolist())
    assert own.figures["tokens_per_step"] > 1, "the engine drafts with it"


def test_a_setting_may_be_newer_than_a_checkpoint(tmp_path: Path) -> None:
    first, _ = train(order("draft_model", tmp_path / "first", settings={"vocabulary": 60, "layers": 1}), QUIET)
    file = first / head_checkpoint.DESCRIPTION
    description = json.loads(file.read_text())
    del description["settings"]["mlp"]
    file.write_text(json.dumps(description))
    with pytest.raises(OptionError, match="mlp=0, which cannot become 8"):
        train(order("draft_model", tmp_path / "no", init=str(first), settings={"mlp": "8"}), QUIET)
    place, _ = train(order("draft_model", tmp_path / "more", init=str(first), settings={"mlp": "0"}), QUIET)
    assert head_checkpoint.load(place).settings["mlp"] == 0


@pytest.mark.parametrize(("name", "value"), [("vocabulary", "40"), ("layers", "1"), ("mlp", "8")])
def test_nothing_shrinks(tmp_path: Path, name: str, value: str) -> None:
    first, _ = train(order("draft_model", tmp_path / "first", settings={"vocabulary": 60, "layers": 2}), QUIET)
    with pytest.raises(OptionError, match=rf"{name}=.*cannot become {value}.*vocabulary and layers can become larger"):
        train(order("draft_model", tmp_path / "no", init=str(first), settings={name: value}), QUIET)
