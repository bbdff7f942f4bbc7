"""`draft_model` without a model: it drafts as it was trained, and every training option improves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import LLM, SamplingParams
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.draft_model_distilled import _LOSSES, _SPAN, DistilledDrafter, DistilledHead, DistilledSettings
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Head
from slipstream.drafters.heads.head_drafter import frame_of, make_head
from slipstream.drafters.heads.head_layer import HeadLayer
from slipstream.drafters.registry import parse_speculate
from slipstream.errors import OptionError
from tests.heads import made_for
from tests.lessons import PROMPT_LEN, drafted_logits, lesson_of, new_head, saved, teach, tokens_per_step, written
from tests.models.test_families import build as family
from tests.tiny import tiny_directory

VOCAB = torch.tensor([token for token in range(97) if token % 5])
ALL = torch.arange(97)


def build(speculate: Any = None, **kwargs: Any) -> LLM:
    return LLM(tiny_directory(0, layers=3, context=300), speculate=speculate, **kwargs)


@pytest.fixture(scope="module")
def school() -> tuple[LLM, list[list[int]]]:
    llm = build()
    return llm, written(llm, 12)


@pytest.fixture(scope="module")
def taught(school: tuple[LLM, list[list[int]]]) -> tuple[str, str]:
    """A student before and after its training."""
    llm, texts = school
    head, settings = new_head(llm, "draft_model", VOCAB, mlp=48)
    before = saved(llm, "draft_model", head, settings)
    losses = teach(head, lesson_of(llm, texts, VOCAB, ()), 60)
    assert losses[-1] < 0.6 * losses[0]
    return str(before), str(saved(llm, "draft_model", head, settings))


def logits_of(head: Head, tokens: torch.Tensor) -> torch.Tensor:
    assert isinstance(head, DistilledHead)
    with torch.no_grad():
        return head.logits(head.judged(tokens))


@pytest.mark.parametrize("shape", [{}, {"depth": 3, "nodes": 9, "branch": 3}])
def test_a_node_has_the_logits_that_training_gives_it(
    shape: dict[str, int],
    school: tuple[LLM, list[list[int]]],
    taught: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over pages, level by level, after accepted and rejected drafts."""
    monkeypatch.setattr("slipstream.drafters.growing.catch_up.CHUNK", 50)
    llm = build({"method": "draft_model", "checkpoint": taught[1], **shape})
    drafter = llm.drafter
    assert isinstance(drafter, DistilledDrafter)
    head = make_head(DistilledDrafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))
    head.load_state_dict(drafter.trained.weights)
    seen = drafted_logits(llm, school[1][0], monkeypatch)
    for text, row in seen[:: max(1, len(seen) // 24)]:
        assert torch.allclose(row, logits_of(head, torch.tensor([text]))[0, -1], atol=1e-4), len(text)


def test_training_makes_it_right_more_often(school: tuple[LLM, list[list[int]]], taught: tuple[str, str]) -> None:
    llm, texts = school
    rates = [tokens_per_step(llm, {"method": "draft_model", "checkpoint": place}, texts) for place in taught]
    assert rates[1] > rates[0] + 0.5


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_its_nodes_can_be_drawn(verifier: str, school: tuple[LLM, list[list[int]]], taught: tuple[str, str]) -> None:
    shape = {"depth": 3, "nodes": 9, "branch": 2}
    llm = build({"method": "draft_model", "checkpoint": taught[1], **shape}, verifier=verifier)
    how = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate([school[1][0][:PROMPT_LEN]], how)
    assert llm.engine.draft_faults == 0 and llm.drafter.samples
    assert 0 < output.stats.accepted < output.stats.drafted


def test_a_student_of_all_the_targets_layers_and_tokens_begins_as_the_target() -> None:
    """The layers that it begins with are taken out of a decoder that has them folded and packed."""
    llm = build()
    head, settings = new_head(llm, "draft_model", ALL, layers=3)
    place = saved(llm, "draft_model", head, settings)
    llm.use({"method": "draft_model", "checkpoint": str(place), "depth": 4})
    prompt = [3, 1, 4, 1, 5] * 30
    for how in (SamplingParams(max_tokens=41, ignore_eos=True), SamplingParams(temperature=0.9, seed=3, max_tokens=41)):
        (output,) = llm.generate([prompt], how)
        assert output.stats.steps == -(-41 // 5) and output.stats.accepted == 41 - output.stats.steps


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_the_first_and_the_last_layers_are_what_it_begins_with(layers: int) -> None:
    llm = build()
    head, _ = new_head(llm, "draft_model", VOCAB, layers=layers)
    assert isinstance(head, DistilledHead)
    view, _ = made_for(llm)
    begun = {1: [0], 2: [0, 2], 3: [0, 1, 2], 5: [0, 1, 2, 1, 2]}[layers]
    assert len(head.stack.layers) == layers
    for layer, index in zip(head.stack.layers, begun, strict=True):
        source = view.layer(index)
        assert source is not None
        assert isinstance(layer.down, nn.Linear) and torch.equal(layer.down.weight, source.down)


@pytest.mark.parametrize("mlp", [24, 96, 128])
def test_a_narrower_mlp_begins_with_the_strongest_units_of_the_targets(mlp: int) -> None:
    """A weak unit adds next to nothing, and is what can be left out; a wider MLP begins at random."""
    llm = build()
    head, _ = new_head(llm, "draft_model", VOCAB, layers=1, mlp=mlp)
    assert isinstance(head, DistilledHead)
    source = made_for(llm)[0].layer(0)
    (layer,) = head.stack.layers
    assert source is not None and isinstance(layer, HeadLayer)
    gate, up = source.gate_up.chunk(2)
    if mlp > len(gate):
        assert not torch.equal(layer.down.weight[:, : len(gate)], source.down)
        return
    lengths = [float(g.norm() * u.norm() * d.norm()) for g, u, d in zip(gate, up, source.down.T, strict=True)]
    kept = sorted(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:mlp])
    assert torch.equal(layer.gate_up.weight, torch.cat([gate[kept], up[kept]]))
    assert torch.equal(layer.down.weight, source.down[:, kept])


def test_layers_with_more_than_plain_matrices_are_not_copied(tmp_path: Path) -> None:
    family("qwen3", tmp_path)
    llm = LLM(tmp_path, speculate=None)
    view, _ = made_for(llm)
    assert view.layer(0) is None
    head, settings = new_head(llm, "draft_model", torch.arange(view.config.vocab_size))
    llm.use({"method": "draft_model", "checkpoint": str(saved(llm, "draft_model", head, settings))})
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert llm.engine.draft_faults == 0 and output.stats.drafted > 0


# -- ways to learn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "on_policy", "least"),
    [("forward", 0.0, 0.1), ("reverse", 0.0, 0.1), ("variation", 0.0, 0.1), ("forward", 1.0, 0.02)],
)
def test_every_loss_brings_the_student_nearer_to_the_target(
    loss: str, on_policy: float, least: float, school: tuple[LLM, list[list[int]]]
) -> None:
    """`least`: how much less often rejection sampling must refuse the student's tokens, on the target's own text."""
    llm, texts = school
    lesson = lesson_of(llm, texts[:4], VOCAB, ())
    head, _ = new_head(llm, "draft_model", VOCAB, mlp=48, loss=loss, on_policy=on_policy)

    def refused() -> float:
        own = torch.softmax(logits_of(head, lesson.tokens)[lesson.learn], -1)
        return float(1 - torch.minimum(own, lesson.probabilities[lesson.learn]).sum(-1).mean())

    before = refused()
    teach(head, lesson, 20)
    assert refused() < before - least


def test_losses_are_zero_only_where_student_and_target_agree() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.1, 0.1]])  # of the second, a tenth is outside the draft vocabulary
    own = p / p.sum(-1, keepdim=True)
    other = torch.tensor([[0.2, 0.2, 0.6], [0.3, 0.3, 0.4]])
    for name, loss in _LOSSES.items():
        best, worse = loss(own.log(), p), loss(other.log(), p)
        assert bool((best < worse).all()), name
    variation = _LOSSES["variation"](other.log(), p)
    assert torch.allclose(variation, torch.tensor([0.4, 0.5]))
    outside = _LOSSES["variation"](own.log(), p)
    assert torch.allclose(outside, torch.tensor([0.0, 0.1]), atol=1e-6)
    kl = (other * (other / p).log()).sum(-1)
    assert torch.allclose(_LOSSES["reverse"](other.log(), p), kl)
    assert torch.isfinite(_LOSSES["reverse"](other.log(), torch.tensor([[1.0, 0.0, 0.0]] * 2))).all()


def test_on_policy_texts_are_the_students_and_what_is_learnt_is_the_targets(
    school: tuple[LLM, list[list[int]]],
) -> None:
    llm, texts = school
    lesson = lesson_of(llm, texts, VOCAB, ())
    head, _ = new_head(llm, "draft_model", VOCAB)
    assert isinstance(head, DistilledHead)
    torch.manual_seed(3)
    own = head._on_policy(lesson)
    changed = own.tokens != lesson.tokens
    assert not changed[:, :PROMPT_LEN].any() and changed.any()
    assert bool((own.learn <= lesson.learn).all())
    for text in range(len(texts)):
        learnt = own.learn[text].nonzero()[:, 0].tolist()
        assert 1 <= len(learnt) <= _SPAN + 1 and learnt == list(range(learnt[0], learnt[-1] + 1))
        # What changed is what rows of the span predict: the next tokens.
        assert set(changed[text].nonzero()[:, 0].tolist()) <= {row + 1 for row in learnt}
    again = lesson_of(llm, own.tokens.tolist(), VOCAB, ())
    assert torch.allclose(own.probabilities[own.learn], again.probabilities[own.learn], atol=1e-5)
    assert not torch.allclose(own.probabilities[own.learn], lesson.probabilities[own.learn], atol=0.1)


def test_the_students_own_tokens_come_from_its_own_distribution(school: tuple[LLM, list[list[int]]]) -> None:
    """A student that is certain writes what it would have written by itself, token after token."""
    llm, texts = school
    lesson = lesson_of(llm, texts, VOCAB, ())
    head, _ = new_head(llm, "draft_model", VOCAB)
    assert isinstance(head, DistilledHead)
    head.stack.norm.data *= 1000.0
    own = head._on_policy(lesson)
    greedy = VOCAB[logits_of(head, own.tokens).argmax(-1)]  # its choice after each token
    for text in range(len(texts)):
        rows = own.learn[text].nonzero()[:, 0]
        rows = rows[rows < rows[0] + _SPAN]
        assert torch.equal(own.tokens[text, rows + 1], greedy[text, rows])


def test_without_on_policy_no_random_number_is_drawn(school: tuple[LLM, list[list[int]]]) -> None:
    llm, texts = school
    lesson = lesson_of(llm, texts, VOCAB, ())
    head, _ = new_head(llm, "draft_model", VOCAB)
    state = torch.get_rng_state()
    head.losses(lesson)
    assert torch.equal(state, torch.get_rng_state())


# -- which draft model ------------------------------------------------------------------------------------------------


def test_a_model_that_is_named_goes_first_and_the_trained_one_is_found(
    taught: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = build()
    monkeypatch.setattr(head_checkpoint, "cache_directory", lambda: tmp_path)
    fingerprint = llm.target.fingerprint
    with pytest.raises(OptionError, match=rf"no draft_model drafter.*{fingerprint}.*train draft_model.*model=PATH"):
        llm.use("draft_model")
    place = head_checkpoint.directory("draft_model", fingerprint)
    head_checkpoint.save(place, head_checkpoint.load(Path(taught[1])), bits=8)
    llm.use("draft_model")
    assert isinstance(llm.drafter, DistilledDrafter)
    assert (llm.drafter.plan.depth, llm.drafter.plan.nodes) == (5, 5)
    llm.use({"method": "draft_model", "model": str(tiny_directory(0, layers=3, context=300))})
    assert isinstance(llm.drafter, DraftModelDrafter)
    assert (llm.drafter.plan.depth, llm.drafter.plan.nodes) == (4, 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("draft_model:model=x,checkpoint=y", "unknown option of drafter 'draft_model': 'checkpoint'"),
        ("draft_model:modell=x", "unknown option of drafter 'draft_model': 'modell'.*did you mean 'model'"),
        ("cascade:ngram+draft_model", "a part of the target's vocabulary.*model=PATH"),
    ],
)
def test_what_cannot_be_is_refused(value: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_speculate(value)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"mlp": -1}, {"loss": "none"}, {"on_policy": 1.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))}=.*out of range"):
        DistilledSettings(**wrong)
