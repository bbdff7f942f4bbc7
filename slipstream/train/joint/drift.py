"""How far a tuned model has drifted from the original, measured on held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.models.model import Model
from slipstream.train.lessons import Texts
from slipstream.train.teacher import Teacher

_TEXTS = 8  # per batch
_SLICE = 1 << 26  # elements of [rows, vocabulary] logits that exist at one time


@dataclass(frozen=True)
class Drift:
    """Two models on the same answers. `kl`: mean KL divergence from the original's next-token distribution to the
    other's, in nats. `changed`: share of positions at which their likeliest tokens differ.
    """

    kl: float
    changed: float
    positions: int


@torch.no_grad()
def drift(original: Model, other: Model, texts: Texts, most: int | None = None) -> Drift:
    """Compare at every position of the held-out answers (at most `most` of them), over the whole vocabulary."""
    kl, changed, positions = 0.0, 0, 0
    last, nothing = original.config.layers - 1, torch.zeros(1, dtype=torch.int64, device=original.device)
    read = texts.held_out[:most]
    for start in range(0, len(read), _TEXTS):
        page = texts.page(read[start : start + _TEXTS]).to(original.device)
        lessons = [
            Teacher(model).lesson(page.tokens, page.prompt_lens, nothing, (last,), page.lengths)
            for model in (original, other)
        ]
        hidden = [lesson.taps[last][lesson.learn] for lesson in lessons]
        for pair in zip(*(rows.split(max(1, _SLICE // original.config.vocab_size)) for rows in hidden), strict=True):
            logits = [model.head(rows).float() for model, rows in zip((original, other), pair, strict=True)]
            before, now = (torch.log_softmax(part, -1) for part in logits)
            kl += float((before.exp() * (before - now)).sum(dtype=torch.float64))
            changed += int((logits[0].argmax(-1) != logits[1].argmax(-1)).sum())
            positions += len(logits[0])
    return Drift(kl / positions, changed / positions, positions)
