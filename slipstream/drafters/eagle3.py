"""`eagle3`: one decoder layer on hidden states of low, middle and high layers of the target drafts token by token.

It is trained on its own outputs: a lesson is read several times over, and from the second time on the layer reads what
it wrote itself one row before, as it will when it drafts. The tree is dynamic: the likeliest paths are followed, and
the likeliest nodes of all levels offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.drafters.head import Frame, Head, HeadSettings, Lesson, Losses, distance, hits
from slipstream.drafters.head_layer import HeadLayer, PagedHeadLayer
from slipstream.drafters.learned import LearnedOptions
from slipstream.drafters.sequential import SequentialDrafter
from slipstream.drafters.unroll import Unrolled, shifted
from slipstream.models.linear import make_linear


@dataclass(frozen=True)
class Eagle3Settings(HeadSettings):
    """`unroll`: levels that the head is trained for, on its own outputs. `decay`: what a level counts against the one
    before it. `mlp`: width of the layer's MLP (0: the target's).
    """

    unroll: int = 6
    decay: float = 0.9
    mlp: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.unroll >= 1, "unroll", "1 or more")
        self.require(0.0 < self.decay <= 1.0, "decay", "above 0, 1 at most")
        self.require(self.mlp >= 0, "mlp", "0 or more")


class Eagle3Head(Head):
    """Taps fused into one hidden state; it and the token's embedding, each normed, go into one layer."""

    def __init__(self, settings: Eagle3Settings, frame: Frame) -> None:
        super().__init__(frame)
        config = frame.config
        width, layers = config.hidden_size, config.layers
        self.settings = settings
        self.taps = tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))
        self.fuse = nn.Linear(len(self.taps) * width, width, bias=False)
        self.embed_norm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.layer = HeadLayer(config, 2 * width, settings.mlp or None)
        self.norm = nn.Parameter(frame.norm.detach().clone().float().cpu())

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer's products read, [..., 2 * width]."""
        parts = self.rms_norm(embedded, self.embed_norm), self.rms_norm(hidden, self.hidden_norm)
        return torch.cat(parts, -1)

    def levels(self, tokens: torch.Tensor, taps: dict[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the output rows read at each level of the unroll, [batch, length, width]."""
        embedded = self.frame.embed(tokens)
        hidden = shifted(self.fuse(torch.cat([taps[layer] for layer in self.taps], -1)), 1)
        rows = Unrolled(self.layer, tokens.shape[1], tokens.device)
        for _ in range(self.settings.unroll):
            hidden = rows.read(self.enter(embedded, hidden), hidden)
            yield self.rms_norm(hidden, self.norm)
            hidden = shifted(hidden, 1)

    def losses(self, lesson: Lesson) -> Losses:
        losses, right = [], []
        for level, hidden in enumerate(self.levels(lesson.tokens, lesson.taps)):
            learn = lesson.learn.clone()
            learn[:, : level + 1] = False  # there is no root that far before them
            logits = self.logits(hidden[learn])
            losses.append(self.settings.decay**level * distance(logits, lesson.probabilities[learn]).mean())
            right.append(hits(logits, lesson.best[learn]))
        return Losses(torch.stack(losses).sum(), torch.stack(right).detach())


class Eagle3Drafter(SequentialDrafter[LearnedOptions]):
    """Draft with a head of one layer."""

    name = "eagle3"
    summary = "one trained layer on hidden states of the target, as a dynamic tree"
    helps = "any text: the best drafter where one has been trained for the target; less where the text is foreign to it"
    cost = "one pass of one layer and of a reduced head per level"
    options_type = LearnedOptions
    settings_type = Eagle3Settings
    head_type = Eagle3Head

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, Eagle3Head)
        dtype, device = self.target.dtype, self.target.device

        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device, dtype)

        self._eps = self.target.config.norm_eps
        self._fuse = make_linear(ready(head.fuse.weight))
        self._norms = tuple(ready(w) for w in (head.embed_norm, head.hidden_norm, head.norm))
        self._layer = PagedHeadLayer(head.layer, dtype, device)
        self._output = make_linear(ready(head.frame.rows))

    def _hidden(self, features: torch.Tensor) -> torch.Tensor:
        return self._fuse(features)

    def _entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embed_norm, hidden_norm, _ = self._norms
        return torch.cat([self._normed(embedded, embed_norm), self._normed(hidden, hidden_norm)], -1), hidden

    def _judged(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._output(self._normed(hidden, self._norms[2]))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, self._eps)
