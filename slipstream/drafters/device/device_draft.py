"""Drafting for lanes: what a drafter does where a whole round runs on the device and the host looks away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

import torch

from slipstream.lanes import Lanes
from slipstream.sequence import Sequence


class DeviceLoop(ABC):
    """A drafter's part of a round, for lanes of one size. Tensors alone: it asks the host for nothing."""

    @abstractmethod
    def fill(self, sequences: Seq[Sequence]) -> None:
        """Take what the host keeps for the sequences, before the first round; not where they go on from the last."""

    @abstractmethod
    def draft(self, sampled: bool) -> None:
        """Write the trees below the roots into the lanes. `sampled`: whether any lane is not greedy."""

    @abstractmethod
    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Keep what the target's pass said of the accepted path, before the lanes move on.

        path [lanes, depth]: the nodes, 0 behind the end; accepted [lanes]: how many; taps [lanes * (1 + nodes), width].
        """

    @abstractmethod
    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        """The host looks again: tell it what is kept. `root_slot`: where the root of the last round was."""


class DeviceDraft(ABC):
    """What a drafter drafts for lanes: trees of one shape."""

    nodes: int  # of a tree, the root not counted
    depth: int  # levels of a tree
    scratch: int  # rows behind a root that drafting may write
    steady: bool = True  # one burst may follow another without `prepare`, `expects` and `rounds` being asked

    @abstractmethod
    def prepare(self, sequences: Seq[Sequence]) -> bool:
        """Bring the drafter up to the sequences' roots; False where that cannot be done for all of them."""

    def expects(self, sequences: Seq[Sequence]) -> bool:
        """Whether there is something to guess. Where there is not, the next few rounds are plain ones, of which the
        drafter is not told: only one that keeps nothing but the text may say so.
        """
        return True

    def rounds(self, sequences: Seq[Sequence], most: int) -> int:
        """How many rounds a burst should have, at most `most`: fewer where it may well be in vain."""
        return most

    def known(self, sequence: Sequence) -> int:
        """How many tokens of a sequence the drafter need not be told: all, or at most `depth` less, before the root."""
        return len(sequence.tokens) - 1

    @abstractmethod
    def loop(self, lanes: Lanes) -> DeviceLoop:
        """The drafter's part of rounds of these lanes."""
