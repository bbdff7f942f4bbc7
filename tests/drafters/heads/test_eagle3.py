"""`eagle3`: it drafts as it was trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.drafters.eagle3 import Eagle3Drafter, Eagle3Head, normed_each
from slipstream.drafters.heads.head_drafter import frame_of, make_head
from slipstream.sequence import TARGET
from tests.grammars import lettered_llm
from tests.heads import random_head
from tests.stepping import stepped
from tests.tiny import tiny_llm


def trained_logits(llm: Any, drafter: Eagle3Drafter, tokens: list[int]) -> torch.Tensor:
    """[levels, length, draft tokens]: what the training path computes for a text."""
    head = make_head(Eagle3Drafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))
    assert isinstance(head, Eagle3Head)
    head.load_state_dict(drafter.trained.weights)
    cache = PagedCache(8)
    llm.model.add_store(cache, TARGET)
    table = cache.open([])
    cache.reserve(table, len(tokens))
    with torch.inference_mode():
        output = llm.model.forward(cache, TARGET, [tree_segment(table, 0, tokens, None)], taps=head.taps)
        taps = {layer: hidden[None].clone() for layer, hidden in output.taps.items()}
    with torch.no_grad():
        return torch.stack([head.logits(hidden[0]) for hidden in head.levels(torch.tensor([tokens]), taps)])


@pytest.mark.parametrize("settings", [{}, {"norm_each": True}, {"feed_normed": True, "stirred": 0.1}], ids=str)
@pytest.mark.parametrize("branch", [1, 3])
def test_a_node_has_the_logits_that_training_gives_it(
    branch: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages, level by level, after accepted and rejected drafts."""
    place = random_head("eagle3", unroll=4, **settings)
    llm = tiny_llm(
        context=300, characters=True, speculate=f"eagle3:checkpoint={place},depth=4,nodes=12,branch={branch}"
    )
    drafter = llm.drafter
    assert isinstance(drafter, Eagle3Drafter)
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []  # text up to the root, path below it, logits
    healthy = drafter._add_level

    def recording(growth: Any, logits: torch.Tensor, level: int) -> None:
        first = growth.fed - len(logits)
        for node, row in zip(range(first, growth.fed), logits, strict=True):
            seen.append((list(growth.sequence.tokens), growth.tree.path_tokens(node), row.clone()))
        healthy(growth, logits, level)

    monkeypatch.setattr(drafter, "_add_level", recording)
    llm.generate([[5, 9, 17, 3] * 34], SamplingParams(temperature=1.0, seed=4, max_tokens=12))
    assert llm.engine.draft_faults == 0
    assert len(seen) > 30
    for text, path, row in seen[:: max(1, len(seen) // 24)]:
        wanted = trained_logits(llm, drafter, text + path)[len(path), -1]
        assert torch.allclose(row, wanted, atol=1e-4), (len(text), path)


@pytest.mark.parametrize(
    "wants",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.0, "structured_outputs": {"regex": "[a-z ]{40}"}}],
)
@pytest.mark.parametrize("vocabulary", [61, 64])  # whole vectors or not
def test_a_program_drafts_what_operations_do(
    wants: dict[str, Any], vocabulary: int, monkeypatch: pytest.MonkeyPatch, same_trees: None
) -> None:
    """Bit for bit: logits, and trees with their confidences, for several texts at once, long and short."""
    place = random_head("eagle3", vocabulary=vocabulary, stirred=0.3)
    prompts = [[5, 9, 17, 3] * (60 if "structured_outputs" in wants else 150), [3, 1, 4, 1, 5], [7] * 40]
    how = SamplingParams(seed=4, max_tokens=14, ignore_eos="structured_outputs" not in wants, **wants)
    drafts: list[list[Any]] = []
    for by_program in (True, False):
        made = lettered_llm if "structured_outputs" in wants else partial(tiny_llm, context=700, characters=True)
        llm = made(speculate=f"eagle3:checkpoint={place},depth=4,nodes=12,branch=3")
        drafter = llm.drafter
        assert isinstance(drafter, Eagle3Drafter)
        if drafter.program is None:
            pytest.skip("no kernels of our own on this machine")
        if not by_program:
            drafter.program = None
        drafts.append([])
        healthy, offer = drafter._add_level, drafter._offer

        def recording(growth: Any, logits: torch.Tensor, level: int, healthy: Any = healthy) -> None:
            drafts[-1].append(logits.tolist())
            healthy(growth, logits, level)

        def offered(growth: Any, offer: Any = offer) -> Any:
            tree = offer(growth)
            drafts[-1].append((tree.tokens, tree.parents, tree.confidence))
            return tree

        monkeypatch.setattr(drafter, "_add_level", recording)
        monkeypatch.setattr(drafter, "_offer", offered)
        llm.generate(prompts, how)
        llm.generate(prompts[1:2], how)
        assert llm.engine.draft_faults == 0
    by_program, by_operations = drafts
    assert len(by_program) > 60
    assert by_program == by_operations


def test_rows_are_made_of_the_targets_hidden_states_again_once_they_are_there() -> None:
    """Only the root's row stays: those after it were made from the head's own output."""
    place = random_head("eagle3")
    llm = tiny_llm(context=300, characters=True, speculate=f"eagle3:checkpoint={place}")
    for _ in stepped(llm, [3, 1, 4, 1, 5], SamplingParams(max_tokens=6, seed=1, ignore_eos=True)):
        if sequences := llm.engine.scheduler.running:
            (sequence,) = sequences
            lengths = sequence.table.lengths
            assert lengths["eagle3.features"] == sequence.cached == len(sequence.tokens) - 1
            assert lengths["eagle3"] <= len(sequence.tokens) - 1


def test_every_tap_has_a_norm_of_its_own() -> None:
    """A layer whose states are a thousand times larger does not drown the others."""
    weight = torch.tensor([1.0, 1.0, 2.0, 0.5])
    found = normed_each(torch.tensor([[3000.0, 4000.0, 0.6, 0.8]]), weight, 2, 0.0)
    length = 0.5**0.5  # of (0.6, 0.8) as a root mean square
    assert torch.allclose(found, torch.tensor([[0.6, 0.8, 1.2, 0.4]]) / length)


def test_a_size_that_is_fed_back_cannot_drift() -> None:
    """With a norm in between, what a level reads has the size of the norm's weight, whatever the layer adds."""
    sizes = {}
    for fed in (False, True):
        llm = tiny_llm(context=300, characters=True)
        llm.use(f"eagle3:checkpoint={random_head('eagle3', unroll=5, feed_normed=fed)}")
        drafter = llm.drafter
        assert isinstance(drafter, Eagle3Drafter)
        head = make_head(Eagle3Drafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))
        assert isinstance(head, Eagle3Head)
        read: list[float] = []
        healthy = head.rms_norm

        def reading(hidden: Any, weight: Any, head: Any = head, read: Any = read, healthy: Any = healthy) -> Any:
            if weight is head.hidden_norm:
                read.append(float(hidden[0, -1].detach().norm()))
            return healthy(hidden, weight)

        head.rms_norm = reading  # type: ignore[method-assign]
        with torch.no_grad():
            head.layer.down.weight.mul_(40.0)
            taps = {layer: torch.randn(1, 12, 64) for layer in head.taps}
            list(head.levels(torch.arange(12)[None], taps))
        sizes[fed] = read
    assert max(sizes[True][1:]) < 1.1 * 64**0.5 < 0.5 * max(sizes[False][1:])


def test_it_begins_as_the_targets_last_layer_on_the_highest_tap() -> None:
    llm = tiny_llm(context=300, characters=True, speculate=f"eagle3:checkpoint={random_head('eagle3')}")
    drafter = llm.drafter
    head = make_head(Eagle3Drafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))  # type: ignore[attr-defined]
    assert isinstance(head, Eagle3Head)
    head.begin()
    source = drafter.target.layer(1)
    assert source is not None
    assert torch.equal(head.layer.qkv.weight[:, 64:], source.qkv) and torch.equal(head.layer.down.weight, source.down)
    tapped = torch.randn(5, 64 * len(head.taps))
    nearly = torch.nn.functional.cosine_similarity(head.fused(tapped), tapped[:, -64:])
    assert bool((nearly > 0.9).all())
