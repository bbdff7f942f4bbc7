"""Heads with random weights for the tiny target, saved as real checkpoints so that the real loader reads them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_drafter import frame_of, make_head, settings_of
from slipstream.drafters.registry import drafter_class
from slipstream.models.view import TargetView
from tests.tiny import tiny_llm

_FOLDER = Path(tempfile.mkdtemp(prefix="slipstream-heads-"))


def made_for(llm: LLM) -> tuple[TargetView, head_checkpoint.Made]:
    """The view of an LLM's target, and the note that a checkpoint for it carries."""
    view = llm.target
    config = view.config
    return view, head_checkpoint.Made(view.fingerprint, "tiny", config.vocab_size, config.hidden_size, config.layers)


@functools.cache
def random_head(method: str, seed: int = 0, vocabulary: int = 61, stirred: float = 0.0, **settings: Any) -> Path:
    """A checkpoint of `method` for the tiny target: untrained, and so wrong nearly always, but never broken.

    `stirred`: how far its weights are moved off where training begins, which may be nowhere in particular.
    """
    view, made = made_for(tiny_llm(context=300, characters=True, device="cpu"))
    kind = drafter_class(method)
    shaped = kind.settings_type(vocabulary=vocabulary, **settings)  # type: ignore[attr-defined]
    vocab = torch.randperm(97, generator=torch.Generator().manual_seed(seed))[: vocabulary or 97].sort().values
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = make_head(kind, settings_of(shaped), frame_of(view, vocab))  # type: ignore[arg-type]
        with torch.no_grad():
            for weight in head.parameters() if stirred else ():
                weight.add_(stirred * torch.randn_like(weight))
    place = Path(tempfile.mkdtemp(dir=_FOLDER)) / method
    weights = {name: weight.detach() for name, weight in head.state_dict().items()}
    head_checkpoint.save(place, head_checkpoint.Trained(method, settings_of(shaped), made, vocab, weights))
    return place
