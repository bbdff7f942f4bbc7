"""Drafting for lanes: the drafter's part of a round that runs entirely on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence


class DeviceKeeper(ABC):
    """What a drafter keeps of the target's outputs in rounds, whether it drafts in them or not.

    Tensor operations only, without host synchronisation.
    """

    @abstractmethod
    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        """Copy the host's state of sequences that take a lane; those that continue from the last round are not here."""

    @abstractmethod
    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Keep the target's outputs on the accepted path, before the lanes move on.

        path [lanes, depth]: the nodes, 0 after the end; accepted [lanes]: how many; taps [lanes * (1 + nodes), width].
        """

    @abstractmethod
    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        """Write the state back to the host after a burst. `root_slot`: slot of the last round's root."""


class DeviceLoop(DeviceKeeper):
    """A drafter's part of a round in which it drafts, for lanes of one size."""

    @abstractmethod
    def draft(self, sampled: bool) -> None:
        """Write the trees below the roots into the lanes. `sampled`: whether any lane is not greedy."""


class DeviceDraft(ABC):
    """A drafter's trees of fixed shape for lanes."""

    nodes: int  # nodes of a tree without the root
    depth: int  # levels of a tree
    scratch: int  # rows after a root that drafting may write
    origins: tuple[str, ...]  # the drafters of its nodes, as `Lanes.origins` numbers them

    @abstractmethod
    def prepare(self, sequences: Seq[Sequence]) -> bool:
        """Bring the drafter up to the sequences' roots; False if that is impossible for any of them."""

    def known(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the drafter already has: all, or at most `depth` fewer, before the root."""
        return len(sequence.tokens) - 1

    @abstractmethod
    def loop(self, lanes: Lanes) -> DeviceLoop:
        """The drafter's part of rounds of these lanes."""
