"""`suffix` alone on the device: chains of a text that repeats itself, and plain rounds where it does not."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from slipstream.drafters.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.repeats import Repeats
from slipstream.lanes import Lanes
from slipstream.sequence import Sequence

if TYPE_CHECKING:
    from slipstream.drafters.suffix import SuffixDrafter

_WORTH_A_CHAIN = 2  # tokens of a match: behind a single one a chain is right too seldom for its rows


class ChainDraft(DeviceDraft):
    """Chains of one length."""

    scratch = 0

    def __init__(self, drafter: SuffixDrafter, length: int) -> None:
        self._drafter = drafter
        self.nodes = self.depth = length

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        return True

    def expects(self, sequences: Seq[Sequence]) -> bool:
        least = max(_WORTH_A_CHAIN, self._drafter.options.min_match)
        return any(self._drafter.matched(sequence) >= least for sequence in sequences)

    def loop(self, lanes: Lanes) -> ChainLoop:
        return ChainLoop(lanes, Repeats(lanes, self.nodes, self._drafter.options.min_match))


class ChainLoop(DeviceLoop):
    """Where a text has no match its lane offers some tokens all the same: a round has the rows anyway."""

    def __init__(self, lanes: Lanes, repeats: Repeats) -> None:
        self._lanes = lanes
        self._repeats = repeats
        lanes.parents[:, 1:] = torch.arange(lanes.nodes, device=lanes.device)

    def fill(self, sequences: Seq[Sequence]) -> None:
        self._repeats.fill(sequences)

    def draft(self, sampled: bool) -> None:
        chains, _ = self._repeats.chains()
        self._lanes.tokens[:, 1:] = chains

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Tokens are all it reads."""

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        """The text is all it keeps."""
