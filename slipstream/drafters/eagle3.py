"""`eagle3`: one decoder layer on hidden states of low, middle and high layers of the target drafts token by token.

It is trained on its own outputs: each lesson is unrolled several times, and from the second time on the layer reads its
own output of the previous row, as it does when it drafts. The tree is dynamic: the likeliest paths are followed, and
the likeliest nodes of all levels are offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from slipstream.drafters.heads.features import within_range
from slipstream.drafters.heads.head import Frame, Head, Lesson, Losses
from slipstream.drafters.heads.head_drafter import HeadOptions
from slipstream.drafters.heads.head_layer import HeadLayer, PagedHeadLayer, begin_as, begin_with
from slipstream.drafters.heads.head_program import head_program
from slipstream.drafters.heads.head_rows import HeadRows
from slipstream.drafters.heads.head_shape import ShapedSettings
from slipstream.drafters.heads.objectives import OBJECTIVES
from slipstream.drafters.heads.sequential import SequentialDrafter
from slipstream.drafters.heads.unroll import Unrolled, losses_of_levels, shifted
from slipstream.models.layers.linear import make_draft_linear
from slipstream.models.layers.norm import RowNorms


@dataclass(frozen=True)
class Eagle3Settings(ShapedSettings):
    """`unroll`: levels that the head is trained for, on its own outputs. `decay`: weight of a level's loss relative to
    the level before. `loss`: of `objectives.py`. `taps`: layers of the target that are read (none: a low, a middle and
    a high one). `norm_each`: a norm of its own for every tap before they are fused. `feed_normed`: the next level reads
    the normed output, as the output rows do, so its size cannot drift from level to level.

    Imported heads may differ: `own_rows`, their own output rows instead of the target's; `norm_taps`, a norm over all
    taps; `norm_residual`, the layer's residual is the normed hidden state.
    """

    unroll: int = 6
    decay: float = 0.9
    taps: tuple[int, ...] = ()
    own_rows: bool = False
    norm_taps: bool = False
    norm_residual: bool = False
    norm_each: bool = False
    feed_normed: bool = False
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.unroll >= 1, "unroll", "1 or more")
        self.require(0.0 < self.decay <= 1.0, "decay", "above 0, 1 at most")
        self.require(self.loss in OBJECTIVES, "loss", ", ".join(OBJECTIVES))
        self.require(not (self.norm_taps and self.norm_each), "norm_each", "false beside norm_taps")
        object.__setattr__(self, "taps", tuple(self.taps))  # a list if read from a file


class Eagle3Head(Head):
    """Taps are fused into one hidden state; it and the token's embedding, each normed, enter one layer."""

    tables = by_token = ("rows",)

    def __init__(self, settings: Eagle3Settings, frame: Frame) -> None:
        config = settings.shaped(frame.config)
        super().__init__(replace(frame, config=config))
        width, layers = config.hidden_size, config.layers
        self.settings = settings
        self.taps = settings.taps or tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))
        settings.require(all(0 <= tap < layers for tap in self.taps), "taps", f"layers 0 to {layers - 1}")
        if settings.norm_taps or settings.norm_each:
            self.taps_norm = nn.Parameter(torch.ones(len(self.taps) * width))
        self.fuse = nn.Linear(len(self.taps) * width, width, bias=False)
        self.embed_norm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.layer = HeadLayer(config, 2 * width)
        self.norm = nn.Parameter(frame.norm.detach().clone().float().cpu())
        if settings.own_rows:
            self.rows = nn.Parameter(frame.rows.detach().clone().float().cpu())

    def begin(self) -> None:
        """Start as the target's last layer on the highest tap."""
        begin_with(self.fuse, len(self.taps) - 1)
        begin_as(self.layer, self.frame.layer(self.frame.config.layers - 1))

    @property
    def output(self) -> torch.Tensor:
        """The output rows, [draft tokens, width]."""
        return self.rows if self.settings.own_rows else self.frame.rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.output.to(hidden.dtype))

    def fused(self, tapped: torch.Tensor) -> torch.Tensor:
        """[..., taps * width] -> [..., width]."""
        if self.settings.norm_taps:
            tapped = self.rms_norm(tapped, self.taps_norm)
        if self.settings.norm_each:
            tapped = normed_each(tapped, self.taps_norm, len(self.taps), self.frame.config.norm_eps)
        return nn.functional.linear(tapped, self.fuse.weight)

    def levels(self, tokens: torch.Tensor, taps: dict[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the output rows read at each level of the unroll, [batch, length, width]."""
        width = self.frame.config.hidden_size
        of_tokens, of_hidden = self.layer.qkv.weight.split(width, 1)
        # The tokens are the same at every level, so their embeddings' share of q, k and v is computed once.
        from_tokens = nn.functional.linear(self.rms_norm(self.frame.embed(tokens), self.embed_norm), of_tokens)
        hidden = shifted(self.fused(torch.cat([taps[layer] for layer in self.taps], -1)), 1)
        rows = Unrolled(self.layer, tokens.shape[1], tokens.device)
        for _ in range(self.settings.unroll):
            normed = self.rms_norm(hidden, self.hidden_norm)
            qkv = from_tokens + nn.functional.linear(normed, of_hidden)
            hidden = rows.read(qkv, normed if self.settings.norm_residual else hidden)
            output = self.rms_norm(hidden, self.norm)
            yield output
            hidden = shifted(output if self.settings.feed_normed else hidden, 1)

    def losses(self, lesson: Lesson) -> Losses:
        settings, levels = self.settings, self.levels(lesson.tokens, lesson.taps)
        return losses_of_levels(self, levels, lesson, settings.decay, OBJECTIVES[settings.loss])


def normed_each(tapped: torch.Tensor, weight: torch.Tensor, taps: int, eps: float) -> torch.Tensor:
    """An RMS norm over each of the taps of [..., taps * width]; `weight` [taps * width]."""
    parts = tapped.unflatten(-1, (taps, -1))
    return nn.functional.rms_norm(parts, parts.shape[-1:], eps=eps).flatten(-2) * weight.to(tapped.dtype)


class Eagle3Drafter(SequentialDrafter[HeadOptions]):
    """Draft with a one-layer head."""

    name = "eagle3"
    summary = "one trained layer on hidden states of the target, as a dynamic tree"
    helps = "any text, if a head was trained for the target; less on text unlike its training data"
    cost = "one pass of one layer and of a reduced LM head per level"
    options_type = HeadOptions
    settings_type = Eagle3Settings
    head_type = Eagle3Head

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, Eagle3Head)
        dtype, device = self.target.dtype, self.target.device

        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device, dtype)

        eps = head.frame.config.norm_eps
        self._taps_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        if head.settings.norm_taps:
            self._taps_norm = RowNorms(ready(head.taps_norm), eps=eps)
        if head.settings.norm_each:
            self._taps_norm = partial(normed_each, weight=ready(head.taps_norm), taps=len(head.taps), eps=eps)
        self._norm_residual, self._feed_normed = head.settings.norm_residual, head.settings.feed_normed
        self._fuse = make_draft_linear(ready(head.fuse.weight))
        self._enter = RowNorms(ready(head.embed_norm), ready(head.hidden_norm), eps=eps)
        self._leave = RowNorms(ready(head.norm), eps=eps)
        self._layer = PagedHeadLayer(head.layer, dtype, device)
        self._output = make_draft_linear(ready(head.output))
        if self._taps_norm is None and not (self._norm_residual or self._feed_normed):
            norms = ready(head.embed_norm), ready(head.hidden_norm), ready(head.norm)
            self.program = head_program(self._layer.native, self._fuse, norms, self._output, self.vocab, eps)

    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        return within_range(self._fuse(features if self._taps_norm is None else self._taps_norm(features)))

    def _entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._enter(embedded, hidden)
        return both, both[:, hidden.shape[1] :] if self._norm_residual else hidden

    def layered(self, embedded: torch.Tensor, hidden: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        output = super().layered(embedded, hidden, rows)
        return self._leave(output) if self._feed_normed else output

    def judged(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._output(hidden if self._feed_normed else self._leave(hidden))
