"""Medusa's static trees on the device: the shape is fixed before the heads run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.drafters.device.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.device.medusa_loop import LastStates
from slipstream.drafters.growing.static_tree import RANKS, StaticTree
from slipstream.gpu import forest
from slipstream.gpu.device_sampling import match_keys
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence

if TYPE_CHECKING:
    from slipstream.drafters.medusa import MedusaDrafter


class StaticDraft(DeviceDraft):
    """Trees of one static shape."""

    scratch = 0

    def __init__(self, drafter: MedusaDrafter, shape: StaticTree) -> None:
        self._drafter = drafter
        self.parents = [0]  # parents of the nodes, the root first
        self.ranks: list[int] = []  # ranks of the nodes below the root
        self.depths = [0]
        for parent, rank, _ in shape.nodes:
            # After its own token every node has other choices, and takes them in order.
            self.ranks.append(self.parents[1:].count(parent) if drafter.by_levels else rank)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        self.nodes = len(self.ranks)
        self.depth = max(self.depths)
        self.origins = (drafter.name,)
        self.scores = [math.log(max(odds, 1e-9)) for _, _, odds in shape.nodes]  # of the nodes below the root

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        return all(map(self._drafter.follows, sequences))

    def loop(self, lanes: Lanes) -> StaticLoop:
        return StaticLoop(self._drafter, self, lanes)


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth that have children, the children, and each child's index among all choices of the parents."""

    parents: torch.Tensor
    children: torch.Tensor
    choices: torch.Tensor

    @staticmethod
    def of(draft: StaticDraft, depth: int, device: str) -> _Level:
        """The level of a shape."""
        children = [node for node in range(1, len(draft.parents)) if draft.depths[node] == depth + 1]
        parents = sorted({draft.parents[node] for node in children})
        choices = [parents.index(draft.parents[node]) * RANKS + draft.ranks[node - 1] for node in children]
        return _Level(*(torch.tensor(numbers, device=device) for numbers in (parents, children, choices)))


class StaticLoop(DeviceLoop):
    """The heads for lanes of one size."""

    def __init__(self, drafter: MedusaDrafter, draft: StaticDraft, lanes: Lanes) -> None:
        self.lanes = lanes
        self._drafter = drafter
        self._states = LastStates(drafter, lanes)
        device = lanes.device
        lanes.parents.copy_(torch.tensor(draft.parents, device=device).expand_as(lanes.parents))
        lanes.scores[:, 1:] = torch.tensor(draft.scores, device=device)
        levels = torch.tensor(draft.depths[1:], device=device) - 1
        self._choices = levels * RANKS + torch.tensor(draft.ranks, device=device)  # of the nodes
        self._levels = torch.arange(draft.depth, device=device)
        self._followed = [_Level.of(draft, depth, device) for depth in range(draft.depth)] if drafter.by_levels else []

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        self._states.fill(sequences)

    def draft(self, sampled: bool) -> None:
        lanes, normed = self.lanes, self._states.normed()
        for depth, level in enumerate(self._followed):
            self._follow(normed, depth, level, sampled)
        if self._followed:
            return
        logits = self._drafter.guesses(normed, lanes.tokens[:, 0], len(self._levels)).flatten(0, 1)
        lanes.tokens[:, 1:] = self._chosen(logits, self._levels, sampled)[:, self._choices]

    def _follow(self, normed: torch.Tensor, depth: int, level: _Level, sampled: bool) -> None:
        """Choose the children of the nodes of one depth."""
        lanes, parents = self.lanes, level.parents
        states = normed.repeat_interleave(len(parents), 0)
        logits = self._drafter.followed(states, lanes.tokens[:, parents].flatten(), depth)
        chosen = self._chosen(logits, torch.full_like(parents, depth), sampled)
        lanes.tokens[:, level.children] = chosen[:, level.choices]

    def _chosen(self, logits: torch.Tensor, depths: torch.Tensor, sampled: bool) -> torch.Tensor:
        """The likeliest tokens for rows of logits, `depths` per lane, [lanes, depths * RANKS]."""
        sampling_noise = self._sampling_noise(depths) if sampled else None
        _, indices = forest.likeliest_tokens(logits, min(RANKS, logits.shape[1]), sampling_noise)
        choices = torch.nn.functional.pad(indices, (0, RANKS - indices.shape[1]))
        return self._drafter.vocab[choices.view(self.lanes.size, len(depths) * RANKS)]

    def _sampling_noise(self, depths: torch.Tensor) -> forest.SamplingNoise:
        """The target's noise at the positions of these depths."""
        lanes, count = self.lanes, len(depths)
        positions = (lanes.slots[:, None] + 1 + depths).flatten()
        keys = match_keys(lanes.stems.repeat_interleave(count, 1), positions)
        return forest.SamplingNoise(lanes.temperatures.repeat_interleave(count), keys, self._drafter.vocab)

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        self._states.observe(path, accepted, taps)

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        self._states.settle(sequence, lane, root_slot)
