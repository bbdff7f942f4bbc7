"""The heads of `medusa`, and what they learn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slipstream.drafters.head import Frame, Head, HeadSettings, Lesson, Losses, distance, hits, mean
from slipstream.drafters.static_tree import RANKS, Tally


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """`heads`: how many places behind the root are guessed. `decay`: what a head counts against the one before it.
    `root`: the heads also read the root's embedding, which is known before they guess. `before`: instead, each reads
    that of the token before its own, a guess of the head above (the first one: the root). `own_rows`: heads as they
    were published, with output rows of their own and no second matrix.
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
        """Hidden states and embeddings that a head reads."""
        return 1 + (self.root or self.before)


class MedusaHead(Head):
    """The heads: h + B silu(A s + a), each with matrices of its own, on the target's last hidden state h, normed.

    They read the state s: h alone, or h and an embedding, normed, beside it: that of the root, or that of the token
    before the head's own. The target's norm comes first and nothing behind the sum: that is the state which the
    target's output rows expect, and at the beginning, with B at zero, every head says what the target itself says of
    the root.
    """

    tables = ("rows", "enter.weight", "leave")  # heads stand below each other in them: no single map of states
    by_token = ("rows",)

    def __init__(self, settings: MedusaSettings, frame: Frame) -> None:
        super().__init__(frame)
        width = frame.config.hidden_size
        self.settings = settings
        self.taps = (frame.config.layers - 1,)
        # One head below the other, as matrices are stored.
        self.enter = nn.Linear(width * settings.states, settings.heads * width)
        if settings.own_rows:
            self.rows = nn.Parameter(frame.rows.detach().float().cpu().repeat(settings.heads, 1))
            for weight in self.enter.parameters():
                nn.init.zeros_(weight)  # here too every head begins by saying what the target says of the root
        else:
            self.leave = nn.Parameter(torch.zeros(settings.heads * width, width))

    def states(self, lesson: Lesson, depth: int) -> torch.Tensor:
        """What a head reads at every token, the next one being the root, [batch, length, width of a state]."""
        hidden = self.rms_norm(lesson.taps[self.taps[0]], self.frame.norm)
        if self.settings.states == 1:
            return hidden
        ahead = 1 + (depth if self.settings.before else 0)
        known = functional.pad(
            lesson.tokens[:, ahead:], (0, ahead)
        )  # behind the last token there is none to learn from
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
            # From row i the root is x_(i+1), and this head's token is the one that row i + depth + 1 speaks of.
            ahead = depth + 1
            there = lesson.counting(ahead)
            logits = self.guess(lesson.at(self.states(lesson, depth), ahead), depth)
            losses.append(self.settings.decay**depth * mean(distance(logits, probabilities), there))
            right.append(mean(hits(logits, best), there))
        return Losses(torch.stack(losses).sum(), torch.stack(right).detach())

    @torch.no_grad()
    def facts(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        """`accuracies`: how often the choice of each rank of each head is what the target wrote, the heads above having
        had theirs among their choices. The shape of the tree is made of it.
        """
        tally = Tally(self.settings.heads)
        for lesson in lessons:
            self._count(lesson, tally)
        return {"accuracies": tally.accuracies} if tally.asked else {}

    def _count(self, lesson: Lesson, tally: Tally) -> None:
        vocab = self.frame.vocab
        tokens, length = lesson.tokens, lesson.tokens.shape[1]
        texts, rows = lesson.learn.nonzero().unbind(1)
        rows = rows - 1  # the root is behind them, and the target's own token behind the root
        for depth in range(self.settings.heads):
            spoken = rows + depth + 1  # the row of the target that speaks of this head's token
            known = (rows >= 0) & (spoken + 1 < length)
            known &= lesson.learn[texts, spoken.clamp_max(length - 1)]
            texts, rows, spoken = texts[known], rows[known], spoken[known]
            choices = self.guess(self.states(lesson, depth)[texts, rows], depth).topk(min(RANKS, len(vocab))).indices
            right = tally.add(depth, vocab[choices], tokens[texts, spoken + 1])
            texts, rows = texts[right], rows[right]


def unit(embedded: torch.Tensor, eps: float) -> torch.Tensor:
    """Embeddings [..., width] at one length; the heads' matrices have a weight for every place as it is."""
    return functional.rms_norm(embedded, embedded.shape[-1:], eps=eps)
