"""A small model that reads nothing but tokens grows trees on the device."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.drafters.keeping import KeepingDrafter
from slipstream.drafters.tree_loop import Passes, TreeDraft, TreeLoop
from slipstream.forest import Followed
from slipstream.lanes import Lanes


class StackLoop(TreeLoop):
    """Layers between the target's embedding and rows of its output matrix.

    What came last is fed again as a whole, though some of its rows lie among the nodes of the last tree: they come with
    the root in one pass, and nothing has to be moved.
    """

    def __init__(self, drafter: KeepingDrafter[Any], draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        config = drafter.target.config
        self.ids = drafter.vocab
        self._drafter = drafter
        self._passes = Passes(lanes, draft.widths, config, lanes.depth + 1)

    def begin(self) -> torch.Tensor:
        rows = self._passes.fresh(self.first_fresh)
        return self._drafter.judged(self.last_fresh(self._drafter.laned(self.lanes.taken.flatten(), *rows)))

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        rows = self._passes.level(level, nodes)
        return self._drafter.judged(self._drafter.laned(nodes.tokens.flatten(), *rows))

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Tokens are all it reads."""
