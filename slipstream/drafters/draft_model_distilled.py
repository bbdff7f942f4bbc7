"""`draft_model` without a model: a small one distilled from the target, which shares the target's weights where it can.

A few layers of the target's width between the target's embedding and selected rows of its output matrix. It reads
nothing of the target's passes, so it can draft before the target has seen a prompt, and after guesses of other
drafters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slipstream.attention import Segment
from slipstream.drafters.base import Drafter
from slipstream.drafters.device.stack_loop import StackLoop
from slipstream.drafters.device.tree_loop import TreeLoop
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.head import Frame, HeadSettings, Lesson, Losses, distance, hits, mean
from slipstream.drafters.heads.head_drafter import HeadOptions
from slipstream.drafters.heads.head_layer import HeadLayer, begin_as
from slipstream.drafters.heads.head_rows import PagedRows
from slipstream.drafters.heads.layer_stack import StackHead
from slipstream.drafters.heads.stack_drafter import StackDrafter

_LAYER = re.compile(r"(stack\.(?:layers|norms)\.)(\d+)")  # prefix of a layer's weight name
_SPAN = 16  # tokens that the student writes itself in an on-policy lesson
_LEAST = 1e-8  # reverse KL clamps the target's probabilities here


def _reverse(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Reverse KL(student || target), up to a constant: penalises tokens that the target never emits."""
    own = torch.log_softmax(logits.float(), -1)
    return (own.exp() * (own - probabilities.float().clamp_min(_LEAST).log())).sum(-1)


def _variation(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Total variation distance: how often rejection sampling rejects the student's token."""
    return 1.0 - torch.minimum(torch.softmax(logits.float(), -1), probabilities.float()).sum(-1)


_LOSSES = {"forward": distance, "reverse": _reverse, "variation": _variation}  # [rows, draft tokens] twice -> [rows]


@dataclass(frozen=True)
class DistilledSettings(HeadSettings):
    """`layers`: number of layers; the first half starts as copies of the target's first, the rest of its last. `mlp`:
    MLP width (0: the target's). `loss`: `forward` or `reverse` KL, or total `variation`. `on_policy`: share of lessons
    in which the student writes a span of each text itself and learns the target's distributions there.
    """

    layers: int = 2
    mlp: int = 0
    loss: str = "forward"
    on_policy: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.layers >= 1, "layers", "1 or more")
        self.require(self.mlp >= 0, "mlp", "0 or more")
        self.require(self.loss in _LOSSES, "loss", ", ".join(_LOSSES))
        self.require(0.0 <= self.on_policy <= 1.0, "on_policy", "0 to 1")


@dataclass(frozen=True)
class DistilledOptions(HeadOptions):
    """`model`: path, hub id or built-in name of a model with the target's vocabulary (then `depth` is 4 unless given);
    without one, the draft distilled from this target, or that of `checkpoint`. `nodes`: 0 for one per level in a chain,
    or a default for a tree. `draw`: `top` (chosen nodes) or `sample` (sampled nodes, for verifiers that read q); `auto`
    samples if the verifier reads q and the request samples.
    """

    depth: int = 5
    branch: int = 1
    model: str = ""


class DistilledHead(StackHead):
    """The student."""

    taps = ()
    growing = ("vocabulary", "layers")

    def __init__(self, settings: DistilledSettings, frame: Frame) -> None:
        super().__init__(frame, settings.layers, settings.mlp)
        self.settings = settings
        self.top_is_enough = settings.loss != "reverse"  # reverse KL needs the full distribution

    def begin(self) -> None:
        layers, count = self.settings.layers, self.frame.config.layers
        first, last = layers - layers // 2, layers // 2
        begun = [*range(min(first, count)), *range(max(0, count - last), count)]
        for layer, index in zip(self.stack.layers, begun, strict=False):  # a target may have fewer layers
            if isinstance(layer, HeadLayer):
                begin_as(layer, self.frame.layer(index))

    def continue_from(self, weights: Mapping[str, torch.Tensor], vocab: torch.Tensor) -> None:
        """Also accepts a student with fewer layers. New layers go in the middle and add nothing at first."""
        layers = self.settings.layers
        former = sum(name.startswith("stack.norms.") for name in weights)
        first = former - former // 2

        def renamed(name: str) -> str:
            found = _LAYER.match(name)
            if found is None or int(found[2]) < first:
                return name
            return f"{found[1]}{int(found[2]) + layers - former}{name[found.end() :]}"

        super().continue_from({renamed(name): weight for name, weight in weights.items()}, vocab)
        for layer in self.stack.layers[first : first + layers - former]:
            if isinstance(layer, HeadLayer):
                nn.init.zeros_(layer.out.weight)
                nn.init.zeros_(layer.down.weight)

    def judged(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the output rows read after each token of whole texts: [batch, length] -> [batch, length, width]."""
        read: torch.Tensor = self.stack(self.frame.embed(tokens))
        return read

    def losses(self, lesson: Lesson) -> Losses:
        share = self.settings.on_policy
        if share > 0.0 and float(torch.rand(())) < share:
            lesson = self._on_policy(lesson)
        logits = self.logits(lesson.at(self.judged(lesson.tokens)))
        total = mean(_LOSSES[self.settings.loss](logits, lesson.at(lesson.probabilities)), lesson.counting())
        return Losses(total, mean(hits(logits, lesson.at(lesson.best)), lesson.counting())[None].detach())

    @torch.no_grad()
    def _on_policy(self, lesson: Lesson) -> Lesson:
        """The lesson with a random span of each text written by the student and labelled by the target."""
        assert lesson.reread is not None
        tokens, learn = lesson.tokens.clone(), lesson.learn
        batch, length = tokens.shape
        texts = torch.arange(batch, device=tokens.device)
        vocab = self.frame.vocab.to(tokens.device)
        # The row after which the student starts. A text without a row to learn from gets one too.
        start = torch.multinomial((learn | ~learn.any(1, keepdim=True)).float(), 1)[:, 0]
        for step in range(_SPAN):
            rows = (start + step).clamp(max=length - 1)
            own = learn[texts, rows] & (start + step < length)
            if not own.any():
                break
            hidden = self.judged(tokens[:, : int(rows.max()) + 1])[texts, rows]
            drawn = torch.multinomial(torch.softmax(self.logits(hidden).float(), -1), 1)[:, 0]
            tokens[texts[own], rows[own] + 1] = vocab[drawn[own]]
        offset = torch.arange(length, device=tokens.device)[None] - start[:, None]
        probabilities = lesson.reread(tokens)
        return replace(
            lesson,
            tokens=tokens,
            learn=learn & (offset >= 0) & (offset <= _SPAN),
            known_rows=None,
            probabilities=probabilities,
            best=probabilities.argmax(-1),
        )


class DistilledDrafter(StackDrafter[DistilledOptions]):
    """Draft with a model distilled from the target."""

    name = DraftModelDrafter.name
    summary = "a smaller model, as a chain or a tree: one distilled from the target, or any with its vocabulary"
    helps = "any text, if the draft model is 10x cheaper than the target and trained on similar data; not small targets"
    cost = "one pass of the draft model per level; memory for its weights and its KV cache"
    needs = "a draft distilled from this target (`slipstream train`), or a model with the target's vocabulary"
    instead = "model=PATH"
    options_type = DistilledOptions
    settings_type = DistilledSettings
    head_type = DistilledHead

    @classmethod
    def resolve_class(cls, given: Mapping[str, object]) -> type[Drafter[Any]]:
        return DraftModelDrafter if given.get("model") else cls

    def _entered(self, growths: list[Growth], segments: list[Segment], rows: PagedRows) -> torch.Tensor:
        return self.target.embed(rows.tokens)

    def loop_type(self) -> type[TreeLoop] | None:
        return StackLoop
