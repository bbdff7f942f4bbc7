"""Trees of a drafter merged with the chain of a repeating text, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from slipstream.drafters.device.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.device.repeats import Repeats
from slipstream.drafters.device.tree_loop import TreeDraft, TreeLoop
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence


class RepeatDraft(DeviceDraft):
    """Trees with room for a chain, without more nodes: the likeliest of both are offered."""

    def __init__(self, trees: TreeDraft, chains: str, min_match: int) -> None:
        """`chains`: the name of the drafter of the chains."""
        self._trees = trees
        self.origins = (*trees.origins, chains)
        self._min_match = min_match
        self.nodes, self.depth, self.scratch = trees.nodes, trees.depth, trees.scratch

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        return self._trees.prepare(sequences)

    def known(self, sequence: Sequence) -> int:
        return self._trees.known(sequence)

    def loop(self, lanes: Lanes) -> RepeatLoop:
        return RepeatLoop(self._trees.loop(lanes), Repeats(lanes, self._trees.chain, self._min_match))


class RepeatLoop(DeviceLoop):
    """Adds chains to the grown trees, before the offered nodes are selected."""

    def __init__(self, trees: TreeLoop, repeats: Repeats) -> None:
        self._trees = trees
        self._repeats = repeats

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
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
