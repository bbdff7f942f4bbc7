"""`early_exit`: the first layers of the target, with its own norm and LM head, are the draft model.

Verification may start after them (`reuse`, see first_layers.py). Where that could change a bit of the result, it runs
all layers unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.drafters.base import DraftRequest
from slipstream.drafters.growing.first_layers import REUSE, FirstLayers, require_exit
from slipstream.drafters.growing.self_draft import SelfDrafter
from slipstream.drafters.growing.tree_growth import Growth, GrowthOptions
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class EarlyExitOptions(GrowthOptions):
    """`exit`: number of layers that the draft runs (0: a third of them). `reuse`: verification starts after those
    layers, `auto` where that changes no bit, `yes` always, `no` never. `nodes` and `draw` are those of `draft_model`.
    """

    exit: int = 0
    reuse: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.exit >= 0, "exit", "1 to the number of layers minus 1, or 0 for a third of them")
        self.require(self.reuse in REUSE, "reuse", ", ".join(REUSE))


class EarlyExitDrafter(SelfDrafter[EarlyExitOptions]):
    """Draft with the first layers."""

    name = "early_exit"
    summary = "the first layers of the target and its own LM head"
    helps = "targets trained for early exit; the first layers of others seldom agree with the whole model"
    cost = "one pass over the first layers and the LM head per level; no extra memory"
    options_type = EarlyExitOptions

    def __init__(self, options: EarlyExitOptions, target: TargetView) -> None:
        super().__init__(options, target)
        count = target.config.layers
        self._exit = options.exit or max(1, count // 3)
        require_exit(self.name, self._exit, count)
        self._first = FirstLayers(target, self._exit, options.reuse)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self._exit))

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        growths = self._grow(requests)
        offers = [self._offer(growth) for growth in growths]
        self._first.prepare(growths, offers)
        return offers

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self._first.run(growths, [growth.segment() for growth in growths]).logits
