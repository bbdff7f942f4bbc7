"""A block drafted in one pass, and the trees of its likeliest paths, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.attention import LaneTiles
from slipstream.drafters.heads.sequential import FeatureLoop
from slipstream.gpu.forest import Followed

if TYPE_CHECKING:
    from slipstream.drafters.device.tree_loop import TreeDraft
    from slipstream.drafters.parallel import ParallelDrafter
    from slipstream.gpu.lanes import Lanes


class ParallelLoop(FeatureLoop):
    """The rows of a lane: the newest tokens, the rows without a token after the root, and padding.

    They form one chain, with the root at another place in each lane.
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
        offset = offsets - lanes.accepted[:, None]  # the root: 0, [lanes, rows]
        place = (offset - 1).clamp(0, max(0, blanks - 1))
        tokens_in = torch.nn.functional.pad(lanes.last_tokens, (0, blanks))
        fused = drafter.hidden(self.features()).unflatten(0, (lanes.size, -1))
        fused = torch.nn.functional.pad(fused, (0, 0, 0, blanks))
        known = (offset <= 0)[..., None]
        embedded = torch.where(known, drafter.target.embed(tokens_in), drafter.mask(place))
        hidden = torch.where(known, fused, drafter.blank)
        rows = drafter.laned(lanes.rows(first, offsets), self._chain.after(first))
        output = drafter.stacked(embedded.flatten(0, 1), hidden.flatten(0, 1), rows)
        wanted = torch.arange(lanes.size, device=lanes.device)[:, None] * len(offsets)
        block = output[(wanted + lanes.accepted[:, None] + self._block).flatten()]
        self._logits = drafter.judged(block).unflatten(0, (lanes.size, -1))
        self._gates = drafter.gates(block).unflatten(0, (lanes.size, -1))
        return self._logits[:, 0]

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        links = self.drafter.linked(nodes.tokens, self._gates[:, level, None])
        return (self._logits[:, level, None] + links).flatten(0, 1)
