"""Trees of a drafter, and the chain that a text which repeats itself gives, as one tree on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from slipstream.drafters.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.repeats import Repeats
from slipstream.drafters.tree_loop import TreeDraft, TreeLoop
from slipstream.lanes import Lanes
from slipstream.sequence import Sequence


class RepeatDraft(DeviceDraft):
    """Trees that have room for a chain. They have no more nodes for it: the likeliest of both are offered."""

    def __init__(self, trees: TreeDraft, min_match: int) -> None:
        self._trees = trees
        self._min_match = min_match
        self.nodes, self.depth, self.scratch = trees.nodes, trees.depth, trees.scratch

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        return self._trees.prepare(sequences)

    def known(self, sequence: Sequence) -> int:
        return self._trees.known(sequence)

    def loop(self, lanes: Lanes) -> RepeatLoop:
        return RepeatLoop(self._trees.loop(lanes), Repeats(lanes, self._trees.chain, self._min_match))


class RepeatLoop(DeviceLoop):
    """Lets chains join the trees that have grown, before it is chosen what is offered."""

    def __init__(self, trees: TreeLoop, repeats: Repeats) -> None:
        self._trees = trees
        self._repeats = repeats

    def fill(self, sequences: Seq[Sequence]) -> None:
        self._trees.fill(sequences)
        self._repeats.fill(sequences)

    def draft(self, sampled: bool) -> None:
        self._trees.grow(sampled)
        self._trees.pool.join(*self._repeats.chains())
        self._trees.offer()

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        self._trees.observe(path, accepted, taps)

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        self._trees.settle(sequence, lane, root_slot)
