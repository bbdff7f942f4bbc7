"""A small model that reads only tokens grows trees on the device."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.drafters.device.tree_loop import Passes, TreeDraft, TreeLoop
from slipstream.drafters.heads.stack_drafter import StackDrafter
from slipstream.gpu.forest import Followed
from slipstream.gpu.lanes import Lanes


class StackLoop(TreeLoop):
    """Layers between the target's embedding and rows of its output matrix.

    The newest tokens are all fed again, though some have rows among the nodes of the last tree: they share a pass with
    the root, and no rows have to be moved.
    """

    def __init__(self, drafter: StackDrafter[Any], draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        config = drafter.target.config
        self.ids = drafter.vocab
        self._drafter = drafter
        self._passes = Passes(lanes, draft.widths, config, lanes.depth + 1)

    def begin(self) -> torch.Tensor:
        rows = self._passes.fresh(self.first_fresh)
        return self._drafter.judged(self.last_fresh(self._drafter.laned(self.lanes.last_tokens.flatten(), *rows)))

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        rows = self._passes.level(level, nodes)
        return self._drafter.judged(self._drafter.laned(nodes.tokens.flatten(), *rows))

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Nothing to keep: the model reads tokens only."""
