"""`kangaroo`: the first layers of the target and a small trained layer after them are the draft model.

The trained layer replaces all the others: it turns the first layers' hidden states into what the output rows read. A
node's hidden state is the target's own, in training and in drafting. So the layer is trained in one pass per text, its
rows stay valid when a node is accepted, and verification may start after the first layers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.attention import Segment
from slipstream.cache import PagedCache
from slipstream.drafters.base import DraftRequest, Outcome
from slipstream.drafters.device.device_draft import DeviceKeeper
from slipstream.drafters.growing.first_layers import REUSE, FirstLayers, require_exit, silent
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.features import FeatureKeeper, FeatureStore
from slipstream.drafters.heads.head import Frame, Head, HeadSettings, Lesson, Losses, distance, hits, mean
from slipstream.drafters.heads.head_drafter import HeadOptions
from slipstream.drafters.heads.head_layer import HeadLayer, begin_as
from slipstream.drafters.heads.head_rows import PagedRows
from slipstream.drafters.heads.layer_stack import StackHead
from slipstream.drafters.heads.stack_drafter import StackDrafter
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class KangarooSettings(HeadSettings):
    """`exit`: number of the target's layers that a draft runs (0: a sixth of them). `mlp`: MLP width of the trained
    layer (0: the target's).
    """

    exit: int = 0
    mlp: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.exit >= 0, "exit", "1 to the number of layers minus 1, or 0 for a sixth of them")
        self.require(self.mlp >= 0, "mlp", "0 or more")


@dataclass(frozen=True)
class KangarooOptions(HeadOptions):
    """`reuse`: verification starts after the layers that the draft ran, `auto` where that changes no bit, `yes` always,
    `no` never. `checkpoint`: a directory written by `slipstream train`; without one, the drafter trained for this
    target. `branch`: 1 for a chain, whose rows can always be reused. `draw` is that of `draft_model`.
    """

    depth: int = 4
    branch: int = 1
    reuse: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.reuse in REUSE, "reuse", ", ".join(REUSE))


class KangarooHead(StackHead):
    """One layer on the residual stream of the target's layer `exit - 1`."""

    def __init__(self, settings: KangarooSettings, frame: Frame) -> None:
        super().__init__(frame, layers=1, mlp=settings.mlp)
        self.exit = settings.exit or max(1, frame.config.layers // 6)
        require_exit(KangarooDrafter.name, self.exit, frame.config.layers)
        self.taps = (self.exit - 1,)

    def begin(self) -> None:
        """Start as the target's last layer."""
        for layer in self.stack.layers:
            if isinstance(layer, HeadLayer):
                begin_as(layer, self.frame.layer(self.frame.config.layers - 1))

    def losses(self, lesson: Lesson) -> Losses:
        logits = self.logits(lesson.at(self.stack(lesson.taps[self.exit - 1])))
        total = mean(distance(logits, lesson.at(lesson.probabilities)), lesson.counting())
        return Losses(total, mean(hits(logits, lesson.at(lesson.best)), lesson.counting())[None].detach())


class KangarooDrafter(StackDrafter[KangarooOptions]):
    """Draft with the first layers and the trained one."""

    name = "kangaroo"
    summary = "the first layers of the target and one trained layer that replaces the others"
    helps = "large targets, on any text; in small ones the first layers are too large a part of a pass"
    cost = "one pass over the first layers, the trained layer and a reduced LM head per level"
    options_type = KangarooOptions
    settings_type = KangarooSettings
    head_type = KangarooHead

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, KangarooHead)
        self._first = FirstLayers(self.target, head.exit, self.options.reuse)

    def attach(self, cache: PagedCache) -> None:
        super().attach(cache)
        width, dtype = self.target.config.hidden_size, self.target.dtype
        self._features = FeatureStore(cache, f"{self.key}.features", self.taps, width, dtype)
        self.stores_needed = (self._features.name,)

    def device_keepers(self, lanes: Lanes, drafting: Seq[Plan] = ()) -> list[DeviceKeeper]:
        return [FeatureKeeper(self._features, lanes)]

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        growths = self._grow(requests)
        offers = [self._offer(growth) for growth in growths]
        self._first.prepare(growths, offers)
        return offers

    def follows(self, sequence: Sequence) -> bool:
        # During prefill, and after guesses of a drafter above, the target's rows before the root are missing, both in
        # its KV cache and in the taps.
        return sequence.cached == len(sequence.tokens) - 1 and self._features.follows(sequence)

    def _entered(self, growths: list[Growth], segments: list[Segment], rows: PagedRows) -> torch.Tensor:
        """Hidden states of the tokens: tapped ones up to the root, then those of a pass over the first layers."""
        running, fresh = [], []
        for growth, segment in zip(growths, segments, strict=True):
            if segment.first_slot + segment.rows > growth.root_slot:
                running.append(growth)
                fresh.append(silent(segment if segment.first_slot >= growth.root_slot else growth.segment()))
        made = iter(self._first.run(running, fresh).hidden.split([s.rows for s in fresh]) if fresh else ())
        parts = []
        for growth, segment in zip(growths, segments, strict=True):
            stop = segment.first_slot + segment.rows
            if segment.first_slot < growth.root_slot:
                tapped = min(stop, growth.root_slot)
                parts.append(self._features.read(segment.table, segment.first_slot, tapped))
            if stop > growth.root_slot:
                parts.append(next(made))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            self._features.append(outcome)

    def depart(self, outcome: Outcome) -> None:
        self._features.append(outcome)
