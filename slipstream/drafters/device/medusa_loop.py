"""Medusa's heads grow dynamic trees on the device: one head per level, no K/V."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from slipstream.drafters.device.device_draft import DeviceKeeper
from slipstream.drafters.device.tree_loop import TreeDraft, TreeLoop
from slipstream.gpu.lanes import path_rows

if TYPE_CHECKING:
    from slipstream.drafters.medusa import MedusaDrafter
    from slipstream.gpu.forest import Followed
    from slipstream.gpu.lanes import Lanes
    from slipstream.sequence import Sequence
    from slipstream.types import Plan


class LastStates(DeviceKeeper):
    """The target's hidden states from which the roots of lanes were chosen: the heads' only input besides tokens."""

    def __init__(self, drafter: MedusaDrafter, lanes: Lanes) -> None:
        config, dtype = drafter.target.config, drafter.target.dtype
        self._drafter = drafter
        self._nodes = lanes.nodes
        self._hidden = torch.zeros(lanes.size, config.hidden_size, dtype=dtype, device=lanes.device)

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        """Copy the hidden states from the sequences."""
        for lane, sequence in sequences.items():
            hidden = self._drafter.hidden_of(sequence)
            if hidden is not None:  # rounds in which the heads do not draft need none
                self._hidden[lane] = hidden

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Keep the hidden states of the last nodes of the accepted paths."""
        last = path_rows(path, self._nodes).gather(1, accepted[:, None])[:, 0]
        self._hidden.copy_(taps[self._drafter.taps[0]][last])

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        """Write the hidden state of a sequence back to the host's state."""
        self._drafter.know(sequence, self._hidden[lane].clone())

    def normed(self) -> torch.Tensor:
        """The hidden states, normed for the heads, [lanes, width]."""
        return self._drafter.target.norm(self._hidden)


class HeadsDraft(TreeDraft):
    """Trees of one plan. The heads need only one hidden state of a text, so no tokens have to be fed before."""

    _drafter: MedusaDrafter

    def __init__(self, drafter: MedusaDrafter, plan: Plan, chain: int = 0) -> None:
        super().__init__(drafter, plan, HeadsLoop, chain)
        self.scratch = 0

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        return all(map(self._drafter.follows, sequences))

    def known(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1

    def joined(self, plan: Plan, chain: int) -> HeadsDraft:
        return HeadsDraft(self._drafter, plan, chain)


class HeadsLoop(TreeLoop):
    """The heads for lanes of one size."""

    def __init__(self, drafter: MedusaDrafter, draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        self.ids = drafter.vocab
        self._drafter = drafter
        self._levels = len(draft.widths)
        self._states = LastStates(drafter, lanes)
        self._normed: torch.Tensor  # [lanes, width]
        self._logits: torch.Tensor  # [lanes, levels, tokens], of heads that do not read guesses

    def begin(self) -> torch.Tensor:
        drafter, roots = self._drafter, self.lanes.tokens[:, 0]
        self._normed = self._states.normed()
        if drafter.by_levels:
            return drafter.followed(self._normed, roots, 0)
        self._logits = drafter.guesses(self._normed, roots, self._levels)
        return self._logits[:, 0]

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        width = nodes.tokens.shape[1]
        if not self._drafter.by_levels:
            return self._logits[:, level].repeat_interleave(width, 0)
        return self._drafter.followed(self._normed.repeat_interleave(width, 0), nodes.tokens.flatten(), level)

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        self._states.fill(sequences)

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        self._states.observe(path, accepted, taps)

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        self._states.settle(sequence, lane, root_slot)
