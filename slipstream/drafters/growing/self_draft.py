"""Self-speculation: some of the target's own layers, its norm and its LM head are the draft model.

No weights are loaded. A draft pass reads the committed K/V of its layers and writes scratch rows after them, in the
target's own store; verification rewrites those rows in every layer. The root has no row yet, so a draft feeds it first.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from slipstream.drafters.growing.tree_growth import GrowingDrafter, Growth, GrowthOptions
from slipstream.sequence import Sequence

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

Options = TypeVar("Options", bound=GrowthOptions)


class SelfDrafter(GrowingDrafter[Options], Generic[Options]):
    """Draft with a subset of the target's layers."""

    def __init__(self, options: Options, target: TargetView) -> None:
        super().__init__(options, target)
        self._require_layers("runs single layers of the target")

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """The layers of a draft pass, in order."""

    def follows(self, sequence: Sequence) -> bool:
        # During prefill, rows before the root are missing: the first token comes without a draft.
        return sequence.cached == len(sequence.tokens) - 1

    def _feed_roots(self, growths: list[Growth]) -> list[torch.Tensor]:
        return list(self._run(growths).split(1))

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self.target.run([growth.segment() for growth in growths], self.layers).logits
