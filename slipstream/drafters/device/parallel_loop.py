"""A block drafted in one pass, and the trees of its likeliest paths, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.attention import LaneTiles
from slipstream.drafters.sequential import FeatureLoop
from slipstream.forest import Followed

if TYPE_CHECKING:
    from slipstream.drafters.parallel import ParallelDrafter
    from slipstream.drafters.tree_loop import TreeDraft
    from slipstream.lanes import Lanes


class ParallelLoop(FeatureLoop):
    """The rows of a lane are what came last, the rows without a token behind the root, and some that fill up.

    All are one chain, of which each lane has its root in another place.
    """

    drafter: ParallelDrafter

    def __init__(self, drafter: ParallelDrafter, draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        config = drafter.shape
        depth = len(draft.widths)
        rows = lanes.depth + depth
        self._chain = LaneTiles(lanes.tables, rows, config.group)
        self._offsets = torch.arange(rows, device=lanes.device)
        self._block = torch.arange(depth, device=lanes.device)
        self._logits: torch.Tensor  # [lanes, depth, draft tokens]
        self._gates: torch.Tensor  # [lanes, depth, rank]

    def begin(self) -> torch.Tensor:
        drafter, lanes, offsets = self.drafter, self.lanes, self._offsets
        first, blanks = self.first_fresh, len(self._block) - 1
        behind = offsets - lanes.accepted[:, None]  # the root: 0, [lanes, rows]
        place = (behind - 1).clamp(0, max(0, blanks - 1))
        told = torch.nn.functional.pad(lanes.taken, (0, blanks))
        fused = drafter.hidden(self.features()).unflatten(0, (lanes.size, -1))
        fused = torch.nn.functional.pad(fused, (0, 0, 0, blanks))
        known = (behind <= 0)[..., None]
        embedded = torch.where(known, drafter.target.embed(told), drafter.mask(place))
        hidden = torch.where(known, fused, drafter.blank)
        rows = drafter.laned(lanes.rows(first, offsets), self._chain.behind(first))
        output = drafter.stacked(embedded.flatten(0, 1), hidden.flatten(0, 1), rows)
        wanted = torch.arange(lanes.size, device=lanes.device)[:, None] * len(offsets)
        block = output[(wanted + lanes.accepted[:, None] + self._block).flatten()]
        self._logits = drafter.judged(block).unflatten(0, (lanes.size, -1))
        self._gates = drafter.gates(block).unflatten(0, (lanes.size, -1))
        return self._logits[:, 0]

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        links = self.drafter.linked(nodes.tokens, self._gates[:, level, None])
        return (self._logits[:, level, None] + links).flatten(0, 1)
