"""A tree of fixed shape: which ranks of a head's choices get a node, and below which.

The shape follows from how often the first, second, ... choice of each head was right on held-out text. The trees of all
sizes are nested, and each is the best of its size: see `marginals.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.drafters.growing.marginals import best_first

RANKS = 10  # a head's choices that are considered
ASSUMED = tuple(0.5 ** (rank + 1) for rank in range(RANKS))  # for every head, if nothing was measured


@dataclass(frozen=True)
class StaticTree:
    """A shape. `nodes`: (parent, rank, probability that the node is right), the best first; the root is node 0."""

    nodes: list[tuple[int, int, float]]

    @classmethod
    def best(cls, accuracies: Sequence[Sequence[float]], nodes: int, branch: int) -> StaticTree:
        """The best tree of `nodes` nodes, with at most `branch` children each.

        `accuracies`: for each depth, how often the choice of each rank is right if the nodes above are.
        """
        ranks = [_descending(depth)[:branch] for depth in accuracies]
        odds = [[depth[rank] for rank in order] for depth, order in zip(accuracies, ranks, strict=True)]
        return cls(best_first(ranks, odds, nodes))

    @cached_property
    def widths(self) -> dict[tuple[int, ...], int]:
        """Number of children by path (ranks among siblings, from the root down); inner nodes only."""
        paths: list[tuple[int, ...]] = [()]
        counts: dict[tuple[int, ...], int] = {}
        for parent, _, _ in self.nodes:
            place = counts.get(paths[parent], 0)
            counts[paths[parent]] = place + 1
            paths.append((*paths[parent], place))
        return counts


def _descending(odds: Sequence[float]) -> list[int]:
    """The ranks, the most accurate first."""
    return sorted(range(len(odds)), key=lambda rank: -odds[rank])


class RankTally:
    """How often each rank was right along texts: a depth counts only if the depths above were right."""

    def __init__(self, depths: int) -> None:
        self._right = torch.zeros(depths, RANKS, dtype=torch.int64)
        self._counted = torch.zeros(depths, dtype=torch.int64)

    def add(self, depth: int, choices: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Count choices [rows, ranks], the best first, against true tokens [rows]; returns which rows were right."""
        found = choices == truth[:, None]
        self._right[depth, : found.shape[1]] += found.sum(0).cpu()
        self._counted[depth] += len(truth)
        return found.any(1)

    @property
    def counted(self) -> bool:
        """Whether anything was counted."""
        return bool(self._counted.any())

    @property
    def accuracies(self) -> list[list[float]]:
        """For each depth, how often each rank was right; 0 if nothing was counted."""
        counted = self._counted[:, None]
        return [[round(odds, 4) for odds in row] for row in (self._right / counted.clamp_min(1)).tolist()]
