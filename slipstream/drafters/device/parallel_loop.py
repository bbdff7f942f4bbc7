"""A block drafted in one pass, and the trees of its likeliest paths, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.attention import LaneTiles
from slipstream.drafters.heads.sequential import FeatureLoop
from slipstream.gpu.forest import Followed
from slipstream.sequence import Sequence
from slipstream.types import GREEDY_TEMPERATURE

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
        drafter, lanes = self.drafter, self.lanes
        block = self._block_output()
        self._logits = drafter.judged(block).unflatten(0, (lanes.size, -1))
        self._gates = drafter.gates(block).unflatten(0, (lanes.size, -1))
        sharpness = drafter.sharpness(block)
        if sharpness is not None:  # it is about the first choice: only greedy requests want that
            greedy = (lanes.temperatures < GREEDY_TEMPERATURE)[:, None, None]
            factor = torch.where(greedy, sharpness.unflatten(0, (lanes.size, -1)), 1.0)
            self._logits, self._gates = self._logits * factor, self._gates * factor
        return self._logits[:, 0]

    def _block_output(self) -> torch.Tensor:
        """The layers' output at the roots and the rows without a token, [lanes * depth, width]."""
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
        return output[(wanted + lanes.accepted[:, None] + self._block).flatten()]

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        links = self.drafter.linked(nodes.tokens, self._gates[:, level, None])
        return (self._logits[:, level, None] + links).flatten(0, 1)


class InjectedLoop(ParallelLoop):
    """The rows of a lane: the root and those without a token. The newest tokens before the root have K/V from the
    target's hidden states, which are written before.
    """

    def __init__(self, drafter: ParallelDrafter, draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        self._chain = LaneTiles(lanes.tables, len(self._block), drafter.shape.group)
        self._fresh = torch.arange(lanes.depth + 1, device=lanes.device)
        self._lines = torch.arange(lanes.size, device=lanes.device).repeat_interleave(lanes.depth + 1)

    def _block_output(self) -> torch.Tensor:
        drafter, lanes = self.drafter, self.lanes
        fused = drafter.hidden(self.features())  # of the row before each of the newest tokens
        # Rows that are none of a token before the root go to the root's slot, which its own row overwrites.
        offsets = (self._fresh - lanes.accepted[:, None] - 1).clamp_max(0)
        offsets = torch.where(lanes.slots[:, None] + offsets < 0, 0, offsets).flatten()
        drafter.inject(fused, lanes.rows_after_roots(self._lines, offsets, offsets))
        masks = drafter.mask(self._block[:-1]).expand(lanes.size, -1, -1)
        embedded = torch.cat([drafter.target.embed(lanes.tokens[:, :1]), masks], 1)
        hidden = torch.cat([self.last_fresh(fused)[:, None], drafter.blank.expand_as(masks)], 1)
        rows = drafter.laned(lanes.rows(lanes.slots, self._block), self._chain.after(lanes.slots))
        return drafter.stacked(embedded.flatten(0, 1), hidden.flatten(0, 1), rows)

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        super().settle(sequence, lane, root_slot)
        # The root's row is one of the head, and not yet from the target's hidden state.
        sequence.table.lengths[self.drafter.key] = min(root_slot, sequence.cached)
