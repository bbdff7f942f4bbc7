"""Self-speculation: some of the target's own layers, its norm and its head are the draft model.

Nothing is loaded. A draft pass reads the committed K/V of the layers that it runs and writes scratch rows behind them,
in the target's own store; verification rewrites those rows in every layer. The root's row is not there yet either, so
it is the first one that a draft feeds.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from slipstream.drafters.levels import GrowingDrafter, Growth, GrowthOptions
from slipstream.errors import OptionError

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

Options = TypeVar("Options", bound=GrowthOptions)


class SelfDrafter(GrowingDrafter[Options], Generic[Options]):
    """Draft with a subset of the target's layers."""

    def __init__(self, options: Options, target: TargetView) -> None:
        super().__init__(options, target)
        if not target.layered:
            raise OptionError(
                f"{self.name} runs single layers of the target, which a model of transformers does not give",
                hint="draft with a method that needs nothing of the inside of the target",
            )

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """The layers that a draft pass runs, in order."""

    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        # While a prompt is being fed, rows before the root are missing: the first token comes without a draft.
        ready = [g for g in growths if g.plan.drafts and g.sequence.cached == g.root_slot]
        if not ready:
            return [None] * len(growths)
        rows = self._run(ready).split(1)
        for growth in ready:
            growth.fed = 1
        found = dict(zip(map(id, ready), rows, strict=True))
        return [found.get(id(g)) for g in growths]

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self.target.run([growth.segment() for growth in growths], self.layers).logits
