"""Lessons for heads of the tiny target, and a training of seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Head, Lesson
from slipstream.drafters.heads.head_drafter import HeadDrafter, frame_of, make_head, settings_of
from slipstream.drafters.registry import drafter_class
from slipstream.train.teacher import Teacher
from tests.heads import made_for

_FOLDER = Path(tempfile.mkdtemp(prefix="slipstream-lessons-"))
PROMPT_LEN = 118  # answers begin in the first page and end in the second


def lesson_of(llm: LLM, texts: list[list[int]], vocab: torch.Tensor, taps: tuple[int, ...]) -> Lesson:
    """The target's outputs while it wrote these texts, all of one length."""
    return Teacher(llm.model).lesson(torch.tensor(texts), torch.full((len(texts),), PROMPT_LEN), vocab, taps)


def written(llm: LLM, count: int) -> list[list[int]]:
    """Texts that the target wrote with certainty, each begun by a random prompt."""
    prompts = torch.randint(97, (count, PROMPT_LEN), generator=torch.Generator().manual_seed(7)).tolist()
    llm.use(None)
    how = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [p + o.token_ids for p, o in zip(prompts, llm.generate(prompts, how), strict=True)]


def new_head(llm: LLM, method: str, vocab: torch.Tensor, **settings: Any) -> tuple[Head, dict[str, Any]]:
    """An untrained head, and its settings."""
    kind = drafter_class(method)
    assert issubclass(kind, HeadDrafter)
    shaped = settings_of(kind.settings_type(**{"vocabulary": len(vocab), **settings}))
    torch.manual_seed(0)
    head = make_head(kind, shaped, frame_of(made_for(llm)[0], vocab))
    head.begin()
    return head, shaped


def saved(llm: LLM, method: str, head: Head, settings: dict[str, Any]) -> Path:
    """A head as a checkpoint."""
    place = Path(tempfile.mkdtemp(dir=_FOLDER)) / method
    weights = {name: weight.detach().clone() for name, weight in head.state_dict().items()}
    made = head_checkpoint.Trained(method, settings, made_for(llm)[1], head.frame.vocab, weights)
    head_checkpoint.save(place, made)
    return place


def teach(head: Head, lesson: Lesson, steps: int) -> list[float]:
    """Train a head on one lesson; its losses."""
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = head.losses(lesson).total
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def tokens_per_step(llm: LLM, speculate: dict[str, Any], texts: list[list[int]]) -> float:
    """By real decoding of the texts."""
    llm.use(speculate)
    how = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([text[:PROMPT_LEN] for text in texts], how)
    assert llm.engine.draft_faults == 0
    return sum(o.stats.emitted for o in outputs) / sum(o.stats.steps for o in outputs)


def drafted_logits(llm: LLM, text: list[int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], torch.Tensor]]:
    """Decode a text; the drafter's logits after roots and nodes: (tokens up to there, logits)."""
    drafter = llm.drafter
    assert isinstance(drafter, HeadDrafter)
    seen: list[tuple[list[int], torch.Tensor]] = []
    healthy = drafter._add_level

    def recording(growth: Growth, logits: torch.Tensor, level: int) -> None:
        for node, row in zip(range(growth.fed - len(logits), growth.fed), logits, strict=True):
            seen.append((growth.sequence.tokens + growth.tree.path_tokens(node), row.clone()))
        healthy(growth, logits, level)

    monkeypatch.setattr(drafter, "_add_level", recording)
    how = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate([text[:PROMPT_LEN]], how)
    assert llm.engine.draft_faults == 0 and output.token_ids == text[PROMPT_LEN:]
    depths = list(zip(output.stats.offered_by_depth, output.stats.accepted_by_depth, strict=True))
    assert depths[1][1] > 0 and depths[0][1] < depths[0][0], "drafts were accepted and refused"
    return seen
