"""Training a layer on its own outputs: the same texts are read several times, each time one level deeper.

At level 0 every row reads the target's hidden states and attends to all rows before it. At level k, row i is the k-th
node below a root at row i - k: it attends to the rows of level 0 up to that root, and to one row of each level between.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from slipstream.drafters.heads.head import Head, Lesson, Losses, distance, hits, mean
from slipstream.drafters.heads.head_layer import HeadLayer, Projected
from slipstream.drafters.heads.objectives import Objective


def shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """[batch, length, ...] shifted `count` rows towards the end; zeros are filled in at the start."""
    return x if count == 0 else functional.pad(x, (*[0, 0] * (x.ndim - 2), count, 0))[:, : x.shape[1]]


class Unrolled:
    """The rows of one lesson, level after level."""

    def __init__(self, layer: HeadLayer, length: int, device: torch.device) -> None:
        self._layer = layer
        self._positions = torch.arange(length, device=device)
        self._turns = layer.turns(self._positions)
        self._levels: list[Projected] = []

    def read(self, qkv: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output at the next level, [batch, length, width]; `qkv` is the output of its first GEMM."""
        rows = self._layer.project(qkv, self._turns)
        self._levels.append(rows)
        mixed = rows.attended() if len(self._levels) == 1 else self._mixed(rows.q)
        return self._layer.close(mixed, residual)

    def _mixed(self, q: torch.Tensor) -> torch.Tensor:
        """Attention of the newest level: [batch, heads, length, size]."""
        depth = len(self._levels) - 1
        first = self._levels[0]
        kv_heads, length = first.k.shape[1:3]
        q = q.unflatten(1, (kv_heads, -1))  # [batch, kv heads, group, length, size]
        group = q.shape[2]
        # The queries of a group are rows of one GEMM: keys and values need not be repeated for them.
        scores = (q.flatten(2, 3) @ first.k.transpose(-1, -2)).unflatten(2, (group, length))
        hidden = self._positions[None, :] > self._positions[:, None] - depth
        hidden[:depth, 0] = False  # rows without a root: not learnt from, but they must stay finite
        scores = scores.masked_fill(hidden, float("-inf"))
        # At level j, row i attends to the row depth - j before it.
        between = [(depth - level, self._levels[level]) for level in range(1, depth + 1)]
        own = [(q * _later(rows.k, back)[:, :, None]).sum(-1, keepdim=True) for back, rows in between]
        weights = torch.softmax(torch.cat([scores, *own], -1), -1, dtype=torch.float32).to(q.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ first.v).unflatten(2, (group, length))
        for index, (back, rows) in enumerate(between):
            mixed = mixed + weights[..., length + index, None] * _later(rows.v, back)[:, :, None]
        joined: torch.Tensor = mixed.flatten(1, 2)
        return joined


def _later(x: torch.Tensor, count: int) -> torch.Tensor:
    """[batch, kv heads, length, size] shifted `count` rows towards the end."""
    return x if count == 0 else functional.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]]


def losses_of_levels(
    head: Head, levels: Iterable[torch.Tensor], lesson: Lesson, decay: float, objective: Objective = distance
) -> Losses:
    """Losses of a head at each level, from what its output rows read there, [batch, length, width]."""
    probabilities, best = lesson.at(lesson.probabilities), lesson.at(lesson.best)
    losses, right = [], []
    for level, hidden in enumerate(levels):
        rooted = lesson.counting(level + 1)  # rows with a root that far before them
        logits = head.logits(lesson.at(hidden))
        losses.append(decay**level * mean(objective(logits, probabilities), rooted))
        right.append(mean(hits(logits, best), rooted))
    return Losses(torch.stack(losses).sum(), torch.stack(right).detach())
