"""`kangaroo`: it drafts as it was trained, and verification reuses its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.drafters.heads.head_drafter import frame_of, make_head
from slipstream.drafters.kangaroo import KangarooDrafter, KangarooHead, KangarooSettings
from slipstream.errors import OptionError
from tests.drafters.growing.test_self_draft import passes
from tests.heads import made_for
from tests.lessons import PROMPT_LEN, drafted_logits, lesson_of, new_head, saved, teach, tokens_per_step, written
from tests.stepping import stepped
from tests.tiny import tiny_directory

PROMPT = [5, 9, 17, 3] * 33  # the answer begins in the second page
VOCAB = torch.tensor([token for token in range(97) if token % 5])


def build(speculate: Any = None, **kwargs: Any) -> LLM:
    return LLM(tiny_directory(0, layers=3, context=300), speculate=speculate, **kwargs)


@pytest.fixture(scope="module")
def taught() -> tuple[str, str, list[list[int]]]:
    """A head before and after its training, and the texts."""
    llm = build()
    texts = written(llm, 12)
    head, settings = new_head(llm, "kangaroo", VOCAB, exit=1, mlp=48)
    before = saved(llm, "kangaroo", head, settings)
    losses = teach(head, lesson_of(llm, texts, VOCAB, head.taps), 60)
    assert losses[-1] < 0.6 * losses[0]
    return str(before), str(saved(llm, "kangaroo", head, settings)), texts


def trained_logits(llm: LLM, drafter: KangarooDrafter, tokens: list[int]) -> torch.Tensor:
    """[length, draft tokens]: what the training path computes for a text."""
    head = make_head(KangarooDrafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))
    assert isinstance(head, KangarooHead)
    head.load_state_dict(drafter.trained.weights)
    tapped = lesson_of(llm, [tokens], drafter.vocab, head.taps).taps[head.exit - 1]
    with torch.no_grad():
        return head.logits(head.stack(tapped))[0]


@pytest.mark.parametrize("reuse", ["yes", "no"])
@pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 3, "nodes": 9, "branch": 3}])
def test_a_node_has_the_logits_that_training_gives_it(
    shape: dict[str, int], reuse: str, taught: tuple[str, str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages, level by level, after accepted and rejected drafts."""
    monkeypatch.setattr("slipstream.drafters.growing.catch_up.CHUNK", 50)
    llm = build({"method": "kangaroo", "checkpoint": taught[1], "reuse": reuse, **shape})
    drafter = llm.drafter
    assert isinstance(drafter, KangarooDrafter)
    seen = drafted_logits(llm, taught[2][0], monkeypatch)
    for text, row in seen[:: max(1, len(seen) // 24)]:
        assert torch.allclose(row, trained_logits(llm, drafter, text)[-1], atol=1e-4), len(text)


def test_training_makes_it_right_more_often(taught: tuple[str, str, list[list[int]]]) -> None:
    before, after, texts = taught
    llm = build()
    rates = [tokens_per_step(llm, {"method": "kangaroo", "checkpoint": place}, texts) for place in (before, after)]
    assert rates[1] > rates[0] + 0.5


def test_rows_of_accepted_nodes_are_kept(taught: tuple[str, str, list[list[int]]]) -> None:
    """All but the next root has a row, except a last node that was offered without being fed."""
    llm = build({"method": "kangaroo", "checkpoint": taught[1]})
    kept = 0
    how = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for delta in stepped(llm, taught[2][0][:PROMPT_LEN], how):
        if sequences := llm.engine.scheduler.running:
            lengths = sequences[0].table.lengths
            known = len(sequences[0].tokens) - 1
            assert lengths["kangaroo.features"] == sequences[0].cached == known
            assert lengths["kangaroo"] in ((0,) if known == PROMPT_LEN else (known - 1, known))
            kept += len(delta.token_ids) > 1 and lengths["kangaroo"] == known
    assert kept > 3


def test_verification_starts_after_the_layers_that_drafting_ran(
    taught: tuple[str, str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    plain = build().generate([PROMPT, PROMPT[:5]], how)
    for reuse, rest in (("auto", 2), ("no", 3)):
        llm = build({"method": "kangaroo", "checkpoint": taught[1], "reuse": reuse}, max_num_seqs=1)
        assert llm.exact
        counts = passes(llm, monkeypatch)
        outputs = llm.generate([PROMPT, PROMPT[:5]], how)
        steps = sum(o.stats.steps for o in outputs)
        assert counts.count(3) + counts.count(2) == steps and counts.count(rest) >= steps - 4
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_prompts_beside_prepared_trees_are_tapped_too(taught: tuple[str, str, list[list[int]]]) -> None:
    """A prompt in a pass that starts after the first layers is fed to these separately, and leaves its taps."""
    llm = build({"method": "kangaroo", "checkpoint": taught[1]})
    how = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    first = stepped(llm, taught[2][0][:PROMPT_LEN], how)
    for _ in range(3):
        next(first)
    second = stepped(llm, taught[2][1][:PROMPT_LEN], how)
    got = [token for delta in second for token in delta.token_ids]
    first.close()  # type: ignore[attr-defined]
    alone = build({"method": "kangaroo", "checkpoint": taught[1]})
    (output,) = alone.generate([taught[2][1][:PROMPT_LEN]], how)
    assert got == output.token_ids
    assert llm.engine.draft_faults == 0


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_its_nodes_can_be_drawn(verifier: str, taught: tuple[str, str, list[list[int]]]) -> None:
    shape = {"depth": 3, "nodes": 9, "branch": 2}
    llm = build({"method": "kangaroo", "checkpoint": taught[1], **shape}, verifier=verifier)
    how = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate([taught[2][0][:PROMPT_LEN]], how)
    assert llm.engine.draft_faults == 0 and llm.drafter.samples
    assert 0 < output.stats.accepted < output.stats.drafted


def test_exits_that_are_not_there_are_refused() -> None:
    view, _ = made_for(build())
    frame = frame_of(view, VOCAB)
    assert KangarooHead(KangarooSettings(), frame).taps == (0,)
    assert KangarooHead(KangarooSettings(exit=2), frame).taps == (1,)
    with pytest.raises(OptionError, match=r"kangaroo: exit=3.*3 layers: 1 to 2"):
        KangarooHead(KangarooSettings(exit=3), frame)
    with pytest.raises(OptionError, match="exit=-1"):
        KangarooSettings(exit=-1)
    with pytest.raises(OptionError, match=r"reuse='perhaps'.*auto, yes, no"):
        build("kangaroo:reuse=perhaps")
