"""`draft_model` without a model: a small one that was distilled from the target and borrows what it can of it.

A few layers of the target's width between the target's own embedding and rows of its own output matrix. Nothing of the
target's passes is read, so it can draft before the target has seen a prompt and behind guesses of others.
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
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.head import Frame, HeadSettings, Lesson, Losses, distance, hits, mean
from slipstream.drafters.head_layer import HeadLayer, begin_as
from slipstream.drafters.head_rows import PagedRows
from slipstream.drafters.keeping import KeepingDrafter
from slipstream.drafters.layer_stack import StackHead
from slipstream.drafters.learned import LearnedOptions
from slipstream.drafters.levels import Growth
from slipstream.drafters.stack_loop import StackLoop
from slipstream.drafters.tree_loop import TreeLoop

_LAYER = re.compile(r"(stack\.(?:layers|norms)\.)(\d+)")  # how the name of a layer's weight begins
_SPAN = 16  # tokens that the student writes itself in a text of a lesson on its own policy
_LEAST = 1e-8  # the least probability of the target that reverse KL tells from 0


def _reverse(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """KL of the student's distribution against the target's, up to a constant: keeps off what the target never says."""
    own = torch.log_softmax(logits.float(), -1)
    return (own.exp() * (own - probabilities.float().clamp_min(_LEAST).log())).sum(-1)


def _variation(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Total variation distance: how often rejection sampling refuses the student's token."""
    return 1.0 - torch.minimum(torch.softmax(logits.float(), -1), probabilities.float()).sum(-1)


_LOSSES = {"forward": distance, "reverse": _reverse, "variation": _variation}  # [rows, draft tokens] twice -> [rows]


@dataclass(frozen=True)
class DistilledSettings(HeadSettings):
    """`layers`: how many; the first half of them begins as the target's first, the rest as its last. `mlp`: width of
    their MLPs (0: the target's). `loss`: `forward` or `reverse` KL, or total `variation`. `on_policy`: the part of the
    lessons in which the student writes a span of each text itself and learns what the target says behind that.
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
class DistilledOptions(LearnedOptions):
    """`model`: path, hub id or built-in name of a model of the target's vocabulary (then `depth` is 4 unless given);
    without one, the draft that was distilled from this target, or that of `checkpoint`. `nodes`: 0 for as many as a
    chain has levels, or as suit a tree. `draw`: `top` (chosen nodes) or `sample` (sampled ones, for verifiers that read
    q); `auto` samples where the verifier reads q and the request does.
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
        self.few_will_do = settings.loss != "reverse"  # which asks how unlikely the others are

    def begin(self) -> None:
        layers, count = self.settings.layers, self.frame.config.layers
        first, last = layers - layers // 2, layers // 2
        begun = [*range(min(first, count)), *range(max(0, count - last), count)]
        for layer, index in zip(self.stack.layers, begun, strict=False):  # a target may have fewer layers
            if isinstance(layer, HeadLayer):
                begin_as(layer, self.frame.layer(index))

    def go_on(self, weights: Mapping[str, torch.Tensor], vocab: torch.Tensor) -> None:
        """Those of a student of fewer layers, too. New ones stand in the middle, and add nothing at first."""
        layers = self.settings.layers
        former = sum(name.startswith("stack.norms.") for name in weights)
        first = former - former // 2

        def renamed(name: str) -> str:
            found = _LAYER.match(name)
            if found is None or int(found[2]) < first:
                return name
            return f"{found[1]}{int(found[2]) + layers - former}{name[found.end() :]}"

        super().go_on({renamed(name): weight for name, weight in weights.items()}, vocab)
        for layer in self.stack.layers[first : first + layers - former]:
            if isinstance(layer, HeadLayer):
                nn.init.zeros_(layer.out.weight)
                nn.init.zeros_(layer.down.weight)

    def judged(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the output rows read behind each token of whole texts: [batch, length] -> [batch, length, width]."""
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
        """The lesson with a span of each text, from a random place on, written by the student and judged anew."""
        assert lesson.reread is not None
        tokens, learn = lesson.tokens.clone(), lesson.learn
        batch, length = tokens.shape
        texts = torch.arange(batch, device=tokens.device)
        vocab = self.frame.vocab.to(tokens.device)
        # The row behind which the student begins. A text without a row to learn from has to begin somewhere, too.
        start = torch.multinomial((learn | ~learn.any(1, keepdim=True)).float(), 1)[:, 0]
        for step in range(_SPAN):
            rows = (start + step).clamp(max=length - 1)
            own = learn[texts, rows] & (start + step < length)
            if not own.any():
                break
            hidden = self.judged(tokens[:, : int(rows.max()) + 1])[texts, rows]
            drawn = torch.multinomial(torch.softmax(self.logits(hidden).float(), -1), 1)[:, 0]
            tokens[texts[own], rows[own] + 1] = vocab[drawn[own]]
        behind = torch.arange(length, device=tokens.device)[None] - start[:, None]
        probabilities = lesson.reread(tokens)
        return replace(
            lesson,
            tokens=tokens,
            learn=learn & (behind >= 0) & (behind <= _SPAN),
            known_rows=None,
            probabilities=probabilities,
            best=probabilities.argmax(-1),
        )


class DistilledDrafter(KeepingDrafter[DistilledOptions]):
    """Draft with a model that was distilled from the target."""

    name = DraftModelDrafter.name
    summary = "a smaller model as a chain or a tree: one that was distilled from the target, or any of its vocabulary"
    helps = "any text, if the draft is 10x cheaper than the target and trained on similar data; not on small targets"
    cost = "one pass of the draft model per level; its weights and its K/V in memory"
    needs = "a draft that was distilled from this target (`slipstream train`), or a model of the target's vocabulary"
    instead = "model=PATH"
    options_type = DistilledOptions
    settings_type = DistilledSettings
    head_type = DistilledHead

    @classmethod
    def serving(cls, given: Mapping[str, object]) -> type[Drafter[Any]]:
        return DraftModelDrafter if given.get("model") else cls

    def _entered(self, growths: list[Growth], segments: list[Segment], rows: PagedRows) -> torch.Tensor:
        return self.target.embed(rows.tokens)

    def loop_type(self) -> type[TreeLoop] | None:
        return StackLoop
