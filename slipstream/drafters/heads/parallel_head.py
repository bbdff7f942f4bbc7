"""The head of `parallel`: rows of known tokens, and rows without a token after the root, learnt in one pass.

With `inject` the rows of known tokens are not seen by others. In their place every layer has K/V projected from the
target's hidden states: that of x_j at position j, for all tokens before the root. Only the root and the rows without a
token are then rows of the head when it drafts, and each layer reads what the target knows, not only the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from slipstream.drafters.heads.head import Frame, Head, HeadSettings, Lesson, Losses, hits, mean, whole
from slipstream.drafters.heads.head_layer import HeadLayer, Projected, begin_as, begin_with
from slipstream.drafters.heads.objectives import OBJECTIVES
from slipstream.drafters.heads.unroll import shifted

_UNLINKED = 0.3  # loss weight of the logits without the link: they select the candidates
_INJECTED = 5  # layers of the target that are read with `inject`, unless `taps` names others
_SHARPEST = 2.0  # logarithm of the largest factor on logits by `confidence`; its inverse is the smallest


@dataclass(frozen=True)
class ParallelSettings(HeadSettings):
    """`block`: tokens drafted per pass. `layers`: of the head. `rank`: of the link between a token and the next.
    `anchors`: share of a lesson's rows after which a block is trained. `decay`: weight of a depth's loss relative to
    the depth before. `mlp`: MLP width of a layer (0: the target's). `taps`: layers of the target that are read (none:
    a low, a middle and a high one; with `inject`, five from low to high). `inject`: every layer of the head attends to
    K/V projected from the target's hidden states. `confidence`: learn how sure each row is. `reach`: the tokens before
    a row that its candidates are found after (0: candidates are those of the row alone). `loss`: of `objectives.py`.
    """

    block: int = 8
    layers: int = 2
    rank: int = 64
    anchors: float = 0.25
    decay: float = 0.9
    mlp: int = 0
    taps: tuple[int, ...] = ()
    inject: bool = False
    confidence: bool = False
    reach: int = 0
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block", "layers", "rank"):
            self.require(getattr(self, name) >= 1, name, "1 or more")
        for name in ("anchors", "decay"):
            self.require(0.0 < getattr(self, name) <= 1.0, name, "above 0, 1 at most")
        for name in ("mlp", "reach"):
            self.require(getattr(self, name) >= 0, name, "0 or more")
        self.require(self.loss in OBJECTIVES, "loss", ", ".join(OBJECTIVES))
        object.__setattr__(self, "taps", tuple(self.taps))  # a list if read from a file


class ParallelHead(Head):
    """Taps are fused into one hidden state; it and the token's embedding, each normed, enter the first layer."""

    tables = ("masks", "pull.weight")
    by_token = ("pull.weight",)

    def __init__(self, settings: ParallelSettings, frame: Frame) -> None:
        super().__init__(frame)
        config = frame.config
        width, layers = config.hidden_size, config.layers
        self.settings = settings
        self.taps = settings.taps or (_spread(layers) if settings.inject else _three(layers))
        settings.require(all(0 <= tap < layers for tap in self.taps), "taps", f"layers 0 to {layers - 1}")
        self.fuse = nn.Linear(len(self.taps) * width, width, bias=False)
        self.embed_norm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        sizes = [2 * width] + [width] * (settings.layers - 1)
        self.stack = nn.ModuleList(HeadLayer(config, size, settings.mlp or None) for size in sizes)
        self.stack_norms = nn.ParameterList(torch.ones(width) for _ in sizes[1:])  # before all layers but the first
        self.norm = nn.Parameter(frame.norm.detach().clone().float().cpu())
        self.masks = nn.Parameter(
            nn.init.normal_(torch.empty(settings.block - 1, width), std=0.02)
        )  # in place of embeddings
        self.blank = nn.Parameter(nn.init.normal_(torch.empty(width), std=0.02))  # in place of hidden states
        self.link = nn.Linear(width, settings.rank, bias=False)
        self.gate = nn.Linear(width, settings.rank, bias=False)
        self.pull = nn.Linear(settings.rank, len(frame.vocab), bias=False)
        nn.init.zeros_(self.gate.weight)
        nn.init.normal_(self.pull.weight, std=0.02)  # the links start weak: the rows are trained first
        if settings.inject:
            self.inject_norm = nn.Parameter(torch.ones(width))
            kv = 2 * config.kv_heads * config.head_dim
            self.inject = nn.ModuleList(nn.Linear(width, kv, bias=False) for _ in sizes)
        if settings.confidence:
            self.sure = nn.Parameter(torch.zeros(width))

    def begin(self) -> None:
        """Start as the target's last layers on the highest tap."""
        config = self.frame.config
        begin_with(self.fuse, len(self.taps) - 1)
        first = max(0, config.layers - len(self.stack))
        for number, layer in enumerate(self.parts()[: config.layers]):
            source = self.frame.layer(first + number)
            begin_as(layer, source)
            if source is not None and self.settings.inject:
                with torch.no_grad():
                    self._injected(number).weight.copy_(source.qkv[config.heads * config.head_dim :])

    def parts(self) -> list[HeadLayer]:
        """The layers, in order."""
        return [layer for layer in self.stack if isinstance(layer, HeadLayer)]

    def _injected(self, number: int) -> nn.Linear:
        """The projection from hidden states to K/V of a layer."""
        found = self.inject[number]
        assert isinstance(found, nn.Linear)
        return found

    @property
    def injection(self) -> torch.Tensor:
        """The projections of all layers, one below the other, [layers * (k and v), width]."""
        return torch.cat([self._injected(number).weight for number in range(len(self.stack))])

    # -- what drafting computes, too ----------------------------------------------------------------------------------

    def linked(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The change of a row's logits, [..., draft tokens], by the embedding of the previous token, [..., width]."""
        added: torch.Tensor = self.pull(self.links(before) * (1.0 + self.gate(hidden)))
        return added

    def links(self, before: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., width] projected for the link, [..., rank]."""
        read: torch.Tensor = self.link(functional.rms_norm(before, before.shape[-1:], eps=self.frame.config.norm_eps))
        return read

    def blocks(self, lesson: Lesson, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output rows read at every token, [batch, length, width], and at the rows without a token after each
        anchor, [batch, anchors, block - 1, width].

        All are rows of one pass: the text, followed by the blocks, which attend to the text up to their anchor.
        """
        (batch, length), count, size = lesson.tokens.shape, len(anchors), self.settings.block - 1
        embedded = self.frame.embed(lesson.tokens)
        fused = self.fuse(torch.cat([lesson.taps[layer] for layer in self.taps], -1))
        masks = self.masks.to(embedded.dtype).repeat(count, 1).expand(batch, -1, -1)
        blanks = self.blank.to(fused.dtype).expand(batch, count * size, -1)
        positions, visible = _layout(length, anchors, size, injected=self.settings.inject)
        known = self.rms_norm(fused, self.inject_norm) if self.settings.inject else None
        hidden = torch.cat([shifted(fused, 1), blanks], 1)
        x = self._read(torch.cat([embedded, masks], 1), hidden, positions, visible, known)
        text, blocks = x.split([length, count * size], 1)
        return text, blocks.unflatten(1, (count, size))

    def _read(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        known: torch.Tensor | None,
    ) -> torch.Tensor:
        """The layers over rows [batch, rows, width]. `visible` [rows, keys] is the attention mask: the keys are those
        of `known` [batch, length, width], if there are any, and of the rows.
        """
        x = hidden
        inputs = torch.cat([self.rms_norm(embedded, self.embed_norm), self.rms_norm(hidden, self.hidden_norm)], -1)
        for number, layer in enumerate(self.parts()):
            if number:
                inputs = self.rms_norm(x, self.stack_norms[number - 1])
            turns = layer.turns(positions)
            rows = layer.project(layer.qkv(inputs), turns)
            if known is not None:
                queries = layer.config.heads * layer.config.head_dim
                k, v = layer.keyed(self._injected(number)(known), turns[: known.shape[1], queries // 2 :].contiguous())
                rows = Projected(rows.q, torch.cat([k, rows.k], 2), torch.cat([v, rows.v], 2))
            x = layer.close(rows.attended(visible), x)
        return self.rms_norm(x, self.norm)

    # -- learning -----------------------------------------------------------------------------------------------------

    def losses(self, lesson: Lesson) -> Losses:
        length, device = lesson.tokens.shape[1], lesson.tokens.device
        share = round(self.settings.anchors * length)
        # Drawn on the host, so that every device trains the same; before the first token nothing is known.
        anchors = (torch.randperm(max(0, length - 1))[: max(1, share)].sort().values + 1).to(device)
        text, blocks = self.blocks(lesson, anchors)
        objective = OBJECTIVES[self.settings.loss]
        losses: list[torch.Tensor] = []
        right: list[torch.Tensor] = []

        def note(
            rows: torch.Tensor, logits: torch.Tensor, loss: torch.Tensor, best: torch.Tensor, counting: torch.Tensor
        ) -> None:
            unsure = self._unsure(rows, logits, best)
            losses.append(self.settings.decay ** len(losses) * mean(loss + unsure, counting))
            right.append(mean(hits(logits, best), counting))

        hidden = lesson.at(text)
        logits = self.logits(hidden)
        loss = objective(logits, lesson.at(lesson.probabilities))
        note(hidden, logits, loss, lesson.at(lesson.best), lesson.counting(1))
        for depth, (texts, which, counting) in enumerate(self._alive(lesson, anchors), 1):
            places = (anchors[which] + depth).clamp_max(length - 1)
            hidden, probabilities = blocks[texts, which, depth - 1], lesson.probabilities[texts, places]
            logits = self.logits(hidden)
            loss = _UNLINKED * objective(logits, probabilities)
            logits = logits + self.linked(hidden, self.frame.embed(lesson.tokens[texts, places]))
            note(hidden, logits, loss + objective(logits, probabilities), lesson.best[texts, places], counting)
        return Losses(torch.stack(losses).sum(), torch.stack(right).detach())

    def _unsure(self, hidden: torch.Tensor, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """The loss of the confidence output, [rows]: how improbable the target's first choice is by sharpened logits.
        Nothing else learns from it.
        """
        if not self.settings.confidence:
            return torch.zeros((), device=hidden.device)
        scaled = logits.detach().float() * sharpness(hidden.detach(), self.sure)
        surprise = functional.cross_entropy(scaled, best.clamp_min(0), reduction="none")
        return surprise * (best >= 0)

    def _alive(
        self, lesson: Lesson, anchors: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each depth below the first: the texts and anchors whose block is the target's own text up to there.

        Padded to whole numbers; the third tensor is the mask. A GPU is synchronised once, for all depths.
        """
        learn = functional.pad(lesson.learn, (0, self.settings.block))
        alive = torch.stack([learn[:, anchors + depth] for depth in range(self.settings.block)]).cummin(0).values[1:]
        alive = alive.flatten(1)  # [depths, batch * anchors]
        order = alive.int().argsort(dim=1, descending=True, stable=True)
        for places, count in zip(order, alive.sum(1).tolist(), strict=True):
            chosen = places[: max(1, whole(count))]
            counting = torch.arange(len(chosen), device=chosen.device) < count
            yield chosen // len(anchors), chosen % len(anchors), counting.float()


def sharpness(hidden: torch.Tensor, sure: torch.Tensor) -> torch.Tensor:
    """How sure rows are, by what the output rows read, [..., width]: a factor on their logits, float32 [..., 1]."""
    level = hidden.float() @ sure.float()
    return level.clamp(-_SHARPEST, _SHARPEST).exp()[..., None]


def _three(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer."""
    return tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))


def _spread(layers: int) -> tuple[int, ...]:
    """Layers from low to high at equal distances."""
    low, high = min(2, layers - 1), max(0, layers - 3)
    return tuple(sorted({low + round(step * (high - low) / (_INJECTED - 1)) for step in range(_INJECTED)}))


def _layout(
    length: int, anchors: torch.Tensor, size: int, *, injected: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a text's rows and of `size` rows after each anchor, [rows]; the attention mask, [rows, keys].

    The keys are the rows; if `injected`, the target's states at the text come first, of which a row sees those before
    its root (a row of the text is its own root), and of the rows of the text it sees its root alone.
    """
    text = torch.arange(length, device=anchors.device)
    roots = anchors.repeat_interleave(size)
    offsets = torch.arange(1, size + 1, device=anchors.device).repeat(len(anchors))
    root_of = torch.cat([text, roots])[:, None]
    of_text = [text < root_of, text == root_of] if injected else [text <= root_of]
    own = (roots[:, None] == roots[None, :]) & (offsets[:, None] >= offsets[None, :])
    return torch.cat([text, roots + offsets]), torch.cat([*of_text, functional.pad(own, (0, 0, length, 0))], 1)
