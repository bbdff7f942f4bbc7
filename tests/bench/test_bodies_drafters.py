"""Drafters of a small model, widened for a body: the same trees, accepted as often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bodies.bodies import BodyCheckpoint
from benchmarks.bodies.shapes import BodyShape
from benchmarks.bodies.widening import widened
from slipstream import LLM, SamplingParams
from slipstream.drafters.heads import head_checkpoint
from slipstream.errors import OptionError
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.tree import TokenTree
from tests.checkpoints import refused
from tests.lessons import PROMPT_LEN, lesson_of, new_head, saved, teach, written
from tests.tiny import tiny_directory

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = torch.tensor([token for token in range(97) if token % 5])
DENSE = BodyShape(160, 10, 9, 3, 32, 128, 131)
MIXTURE = replace(DENSE, experts=4, experts_per_token=2, expert_size=96)
ELSEWHERE = {"heads": 4, "kv_heads": 1, "head_dim": 8, "rope_theta": 500.0, "norm_eps": 1e-4, "own_rows": True}

# Method, settings of its head, options of its drafter.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle3": ("eagle3", {}, {"nodes": 12}),
    "eagle3 from elsewhere": ("eagle3", {**ELSEWHERE, "norm_taps": True, "norm_residual": True, "mlp": 48}, {}),
    "mtp": ("mtp", {}, {"nodes": 12}),
    "mtp of three modules": ("mtp", {"modules": 3, "mlp": 48}, {"branch": 1}),
    "medusa": ("medusa", {}, {"tree": "dynamic"}),
    "medusa that reads the root": ("medusa", {"root": True}, {}),
    "medusa that reads the token before": ("medusa", {"before": True}, {}),
    "medusa with its own rows": ("medusa", {"own_rows": True, "heads": 3}, {}),
    "parallel": ("parallel", {"block": 4}, {"nodes": 12}),
    "kangaroo": ("kangaroo", {}, {"nodes": 9, "branch": 3}),
    "kangaroo whose rows serve twice": ("kangaroo", {"exit": 7, "mlp": 48}, {"reuse": "yes"}),
    "draft_model": ("draft_model", {"mlp": 48}, {}),
}


@pytest.fixture(scope="module")
def small() -> LLM:
    return LLM(tiny_directory(0, layers=8, context=300), speculate=None)


@pytest.fixture(scope="module")
def texts(small: LLM) -> list[list[int]]:
    return written(small, 4)


@pytest.fixture(scope="module")
def bodies(small: LLM) -> dict[BodyShape, tuple[LLM, BodyCheckpoint]]:
    made = {}
    for shape in (DENSE, MIXTURE):
        body = BodyCheckpoint(open_checkpoint(small.model.name), "test", shape, "cpu", torch.float32)
        made[shape] = LLM(body, speculate=None), body
    return made


def trained_head(llm: LLM, texts: list[list[int]], method: str, settings: dict[str, Any]) -> head_checkpoint.Trained:
    """A head that has learnt enough to be right now and then."""
    llm.use(None)
    head, shaped = new_head(llm, method, VOCAB, **settings)
    teach(head, lesson_of(llm, texts, VOCAB, head.taps), 10)
    return head_checkpoint.load(saved(llm, method, head, shaped))


def decoded(
    llm: LLM, place: Path, drafter: head_checkpoint.Trained, options: dict[str, Any], texts: list[list[int]]
) -> tuple[list[list[int]], list[TokenTree], tuple[int, int]]:
    """What is said, greedily and drawn, every proposal on the way, and (steps, accepted)."""
    head_checkpoint.save(place, drafter)
    llm.use({"method": drafter.method, "checkpoint": str(place), **options})
    proposals: list[TokenTree] = []
    propose: Callable[[Any], list[TokenTree]] = llm.drafter.propose

    def recording(requests: Any) -> list[TokenTree]:
        trees = propose(requests)
        proposals.extend(trees)
        return trees

    llm.drafter.propose = recording  # type: ignore[method-assign]
    how = [SamplingParams(temperature=0.0 if i % 2 else 0.7, seed=i, max_tokens=24) for i in range(len(texts))]
    outputs = llm.generate([text[:PROMPT_LEN] for text in texts], how)
    assert llm.engine.draft_faults == 0
    counts = sum(o.stats.steps for o in outputs), sum(o.stats.accepted for o in outputs)
    return [output.token_ids for output in outputs], proposals, counts


@pytest.mark.parametrize("case", CASES)
def test_it_drafts_the_same_trees_and_they_are_accepted_as_often(
    case: str, small: LLM, texts: list[list[int]], bodies: dict[BodyShape, tuple[LLM, BodyCheckpoint]], tmp_path: Path
) -> None:
    method, settings, options = CASES[case]
    drafter = trained_head(small, texts, method, settings)
    said, trees, counts = decoded(small, tmp_path / "small", drafter, options, texts)
    assert counts[1] > 0, "some drafts are accepted"
    for shape in (DENSE, MIXTURE) if case == "eagle3" else (DENSE,):
        llm, body = bodies[shape]
        wide = widened(drafter, body, llm.model.fingerprint)
        repeated, wide_trees, wide_counts = decoded(llm, tmp_path / "wide", wide, options, texts)
        assert repeated == said and wide_counts == counts
        for tree, other in zip(trees, wide_trees, strict=True):
            assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
            assert other.confidence == pytest.approx(tree.confidence, rel=1e-3)
        grown = {name for name, weight in wide.weights.items() if weight.numel() > drafter.weights[name].numel()}
        assert grown == wide.weights.keys() - {"pull.weight"}


def test_what_a_widened_checkpoint_says_of_itself(
    small: LLM, texts: list[list[int]], bodies: dict[BodyShape, tuple[LLM, BodyCheckpoint]]
) -> None:
    llm, body = bodies[DENSE]
    drafter = replace(trained_head(small, texts, "eagle3", {"mlp": 48, "taps": (1, 5, 6)}), figures={"seen": 3})
    wide = widened(drafter, body, llm.model.fingerprint)
    assert body.order == (0, 1, 2, 3, 4, None, 5, None, 6, 7)
    assert wide.settings == {**drafter.settings, "taps": (1, 6, 8), "mlp": 64}
    assert wide.target == head_checkpoint.Made(llm.model.fingerprint, body.name, 131, 160, 10)
    assert wide.provenance["widened for"] == body.name and wide.figures == {"seen": 3}
    assert torch.equal(wide.vocab, drafter.vocab)
    weight = wide.weights["layer.gate_up.weight"]
    assert weight.shape == (128, 160) and bool((weight[:, :-65] != 0).all()), "what nobody reads is random"


def test_what_cannot_be_widened_is_refused(
    small: LLM, texts: list[list[int]], bodies: dict[BodyShape, tuple[LLM, BodyCheckpoint]], tmp_path: Path
) -> None:
    _, body = bodies[DENSE]
    drafter = trained_head(small, texts, "medusa", {})
    other = replace(drafter, target=replace(drafter.target, fingerprint="0123", name="another"))
    with refused(OptionError, "medusa", "another", "0123", body.source_fingerprint):
        widened(other, body, "any")
    with refused(OptionError, "suffix", "nothing to widen"):
        widened(replace(drafter, method="suffix"), body, "any")
    with refused(OptionError, "medusa", "strange.weight is unknown"):
        widened(replace(drafter, weights={**drafter.weights, "strange.weight": torch.ones(2, 2)}), body, "any")
    with refused(OptionError, "medusa", "leave"):
        weights = {name: weight for name, weight in drafter.weights.items() if name != "leave"}
        widened(replace(drafter, weights=weights), body, "any")


def test_heads_that_would_read_other_layers_are_refused() -> None:
    """With three layers, low, middle and high are those; a body of five has but one by the same rule. Checkpoints made
    before heads could name their layers follow that rule."""
    llm = LLM(tiny_directory(0, layers=3, context=300), speculate=None)
    body = BodyCheckpoint(open_checkpoint(llm.model.name), "test", replace(DENSE, layers=5), "cpu", torch.float32)
    head, settings = new_head(llm, "parallel", VOCAB)
    drafter = head_checkpoint.load(saved(llm, "parallel", head, settings))
    assert head.taps == (0, 1, 2)
    unnamed = {name: value for name, value in drafter.settings.items() if name != "taps"}
    assert len(unnamed) < len(drafter.settings)
    with refused(OptionError, "parallel", "a body of 5 layers", "[0, 1, 2]"):
        widened(replace(drafter, settings=unnamed), body, "any")
