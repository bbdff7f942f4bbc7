"""The heads of `medusa` and their training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slipstream.drafters.growing.static_tree import RANKS, RankTally
from slipstream.drafters.heads.head import Frame, Head, HeadSettings, Lesson, Losses, distance, hits, mean


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """`heads`: positions after the root that are guessed. `decay`: weight of a head's loss relative to the one before.
    `root`: the heads also read the root's embedding, which is known before they guess. `before`: instead, each reads
    the embedding of the previous token, a guess of the head above (the first: the root). `own_rows`: heads as
    published, with their own output rows and no second matrix.
    """

    heads: int = 5
    decay: float = 0.8
    root: bool = False
    before: bool = False
    own_rows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.heads >= 1, "heads", "1 or more")
        self.require(0.0 < self.decay <= 1.0, "decay", "above 0, 1 at most")
        self.require(self.root + self.before + self.own_rows <= 1, "root", "true where before and own_rows are false")

    @property
    def states(self) -> int:
        """Number of hidden states and embeddings that a head reads."""
        return 1 + (self.root or self.before)


class MedusaHead(Head):
    """The heads: h + B silu(A s + a), each with its own matrices, on the target's last hidden state h, normed.

    They read the state s: h alone, or h next to a normed embedding, that of the root or of the previous token. The
    target's norm comes first and nothing follows the sum: the target's output rows expect that state, and initially,
    with B at zero, every head repeats the target's own distribution.
    """

    tables = ("rows", "enter.weight", "leave")  # several heads stacked: not a single map of states
    by_token = ("rows",)

    def __init__(self, settings: MedusaSettings, frame: Frame) -> None:
        super().__init__(frame)
        width = frame.config.hidden_size
        self.settings = settings
        self.taps = (frame.config.layers - 1,)
        # Heads stacked along the rows, as matrices are stored.
        self.enter = nn.Linear(width * settings.states, settings.heads * width)
        if settings.own_rows:
            self.rows = nn.Parameter(frame.rows.detach().float().cpu().repeat(settings.heads, 1))
            for weight in self.enter.parameters():
                nn.init.zeros_(weight)  # here too every head starts with the target's own distribution
        else:
            self.leave = nn.Parameter(torch.zeros(settings.heads * width, width))

    def states(self, lesson: Lesson, depth: int) -> torch.Tensor:
        """The input of a head at every token, the next one being the root, [batch, length, width of a state]."""
        hidden = self.rms_norm(lesson.taps[self.taps[0]], self.frame.norm)
        if self.settings.states == 1:
            return hidden
        ahead = 1 + (depth if self.settings.before else 0)
        known = functional.pad(lesson.tokens[:, ahead:], (0, ahead))  # nothing follows the last token
        return torch.cat([hidden, unit(self.frame.embed(known), self.frame.config.norm_eps)], -1)

    def guess(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits of one head, [rows, width of a state] -> [rows, draft tokens]."""
        width = self.frame.config.hidden_size
        own, hidden = slice(depth * width, (depth + 1) * width), states[..., :width]
        inner = functional.silu(functional.linear(states, self.enter.weight[own], self.enter.bias[own]))
        if self.settings.own_rows:
            return functional.linear(hidden + inner, self.rows.chunk(self.settings.heads)[depth])
        return self.logits(hidden + functional.linear(inner, self.leave[own]))

    def losses(self, lesson: Lesson) -> Losses:
        probabilities, best = lesson.at(lesson.probabilities), lesson.at(lesson.best)
        losses, right = [], []
        for depth in range(self.settings.heads):
            # At row i the root is x_(i+1), and the target's distribution of this head's token is at row i + depth + 1.
            ahead = depth + 1
            there = lesson.counting(ahead)
            logits = self.guess(lesson.at(self.states(lesson, depth), ahead), depth)
            losses.append(self.settings.decay**depth * mean(distance(logits, probabilities), there))
            right.append(mean(hits(logits, best), there))
        return Losses(torch.stack(losses).sum(), torch.stack(right).detach())

    @torch.no_grad()
    def facts(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        """`accuracies`: how often the choice of each rank of each head is the target's token, given that the heads
        above had theirs among their choices. The static tree is computed from it.
        """
        tally = RankTally(self.settings.heads)
        for lesson in lessons:
            self._count(lesson, tally)
        return {"accuracies": tally.accuracies} if tally.counted else {}

    def _count(self, lesson: Lesson, tally: RankTally) -> None:
        vocab = self.frame.vocab
        tokens, length = lesson.tokens, lesson.tokens.shape[1]
        texts, rows = lesson.learn.nonzero().unbind(1)
        rows = rows - 1  # the root follows these rows, and the target's own token follows the root
        for depth in range(self.settings.heads):
            spoken = rows + depth + 1  # the target's row that predicts this head's token
            known = (rows >= 0) & (spoken + 1 < length)
            known &= lesson.learn[texts, spoken.clamp_max(length - 1)]
            texts, rows, spoken = texts[known], rows[known], spoken[known]
            choices = self.guess(self.states(lesson, depth)[texts, rows], depth).topk(min(RANKS, len(vocab))).indices
            right = tally.add(depth, vocab[choices], tokens[texts, spoken + 1])
            texts, rows = texts[right], rows[right]


def unit(embedded: torch.Tensor, eps: float) -> torch.Tensor:
    """Embeddings [..., width] normed to one length, without a weight: the heads' matrices contain one."""
    return functional.rms_norm(embedded, embedded.shape[-1:], eps=eps)
