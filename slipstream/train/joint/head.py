"""Joint loss of a head and its target: the head predicts the target, the target stays close to the original."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from slipstream.drafters.heads.head import Head, Lesson, Losses, mean
from slipstream.train.joint.model import TunedModel

_SLICE = 1 << 26  # elements of [rows, vocabulary] logits that exist at one time


class JointHead(Head):
    """A head of any method on the hidden states of a tuned target.

    The loss is the KL divergence of the tuned target's distribution from the original's (over the whole vocabulary, at
    every row to learn from), plus `weight` times the head's loss. The head learns the tuned target's distribution, not
    the original's: its drafts will be verified by the tuned target. No gradient flows through that distribution, so the
    target is drawn towards being predictable only through the hidden states that the head reads.
    """

    def __init__(self, head: Head, tuned: TunedModel, weight: float) -> None:
        super().__init__(head.frame)
        self.head = head
        self.tuned = tuned
        self.taps = (head.frame.config.layers - 1,)  # the original's last layer: its distributions are computed from it
        self._weight = weight

    def matrices(self) -> list[nn.Parameter]:
        return self.head.matrices()  # the target's low-rank updates use AdamW

    def stored_matrices(self) -> list[nn.Parameter]:
        return self.head.stored_matrices()

    def losses(self, lesson: Lesson) -> Losses:
        retold, moved = self._relabelled(lesson)
        losses = self.head.losses(retold)
        return Losses(mean(moved, lesson.counting()) + self._weight * losses.total, losses.accuracy)

    def facts(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        return self.head.facts(self._relabelled(lesson)[0] for lesson in lessons)

    def _relabelled(self, lesson: Lesson) -> tuple[Lesson, torch.Tensor]:
        """The lesson with the tuned target's outputs, and the KL divergence of its rows [rows]."""
        vocab, shape = self.frame.vocab, lesson.tokens.shape
        hidden, taps = self.tuned.read(lesson.tokens, self.head.taps)
        size = max(1, _SLICE // self.frame.config.vocab_size)
        slices = zip(lesson.at(lesson.taps[self.taps[0]]).split(size), lesson.at(hidden).split(size), strict=True)
        parts = [recomputed(self._compared, *pair, use_reentrant=False, preserve_rng_state=False) for pair in slices]
        moved, some, first = (torch.cat(column) for column in zip(*parts, strict=True))
        probabilities = some.new_zeros(shape.numel(), len(vocab)).index_copy_(0, lesson.rows, some)
        best = first.new_full((shape.numel(),), -1).index_copy_(0, lesson.rows, first)
        tuned_lesson = replace(lesson, taps=taps, probabilities=probabilities.view(*shape, -1), best=best.view(shape))
        return replace(tuned_lesson, reread=None), moved

    def _compared(self, before: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows [rows, width] of the original and the tuned target: the KL divergence, the tuned target's
        probabilities of the draft tokens, and its first choice among them (-1: none).
        """
        vocab = self.frame.vocab
        logits = self.tuned.logits(now)
        tuned = torch.log_softmax(logits, -1, dtype=torch.float32)
        with torch.no_grad():
            original = torch.log_softmax(self.tuned.logits(before), -1, dtype=torch.float32)
            probabilities, choice = tuned[:, vocab].exp(), logits.argmax(-1)
            place = torch.searchsorted(vocab, choice).clamp_max(len(vocab) - 1)
            best = torch.where(vocab[place] == choice, place, -1)
        return (original.exp() * (original - tuned)).sum(-1), probabilities, best
