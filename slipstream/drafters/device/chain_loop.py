"""`suffix` alone on the device: chains where a text repeats itself, plain rounds where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from slipstream.drafters.device.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.device.repeats import Repeats
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence

if TYPE_CHECKING:
    from slipstream.drafters.suffix import SuffixDrafter

_LEAST = -60.0  # the score without a match


class ChainDraft(DeviceDraft):
    """Chains of one length."""

    scratch = 0

    def __init__(self, drafter: SuffixDrafter, length: int) -> None:
        self.nodes = self.depth = length
        self.origins = (drafter.name,)
        self._min_match = drafter.options.min_match

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        return True

    def loop(self, lanes: Lanes) -> ChainLoop:
        return ChainLoop(lanes, Repeats(lanes, self.nodes, self._min_match))


class ChainLoop(DeviceLoop):
    """A lane without a match offers some tokens too: its rows are part of the round anyway."""

    def __init__(self, lanes: Lanes, repeats: Repeats) -> None:
        self._lanes = lanes
        self._repeats = repeats
        lanes.parents[:, 1:] = torch.arange(lanes.nodes, device=lanes.device)

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        self._repeats.fill(sequences)

    def draft(self, sampled: bool) -> None:
        self._lanes.tokens[:, 1:], scores = self._repeats.chains()
        self._lanes.scores[:, 1:] = scores.clamp_min(_LEAST)

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Nothing to keep: chains come from tokens only."""

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        """Nothing to write back: the loop keeps the text only."""
