"""The cost of passes on this machine, and the gain of a chain at that cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.attention import Segment
from slipstream.cache import PageTable
from slipstream.models.view import TargetView

DEEPEST = 8  # longest chain considered
_ROUNDS = 7

Clock = Callable[[], float]


@dataclass(frozen=True)
class Estimate:
    """Estimated speed-up: plain decoding is 1."""

    speedup: float
    depth: int


@dataclass(frozen=True)
class Costs:
    """Seconds. `verify[n]`: a pass of n + 1 rows through all layers; `head`: one row through no layer."""

    layers: int
    verify: tuple[float, ...]
    head: float

    @property
    def plain(self) -> float:
        """A step of plain decoding."""
        return self.verify[0]

    def draft(self, layers: int) -> float:
        """A pass of one row through so many layers, assuming that all cost the same."""
        return self.head + layers * max(0.0, self.plain - self.head) / self.layers

    def estimate(self, agreement: float, layers: int) -> Estimate:
        """The best chain, assuming that every draft is right as often as the first one."""
        return max(
            (Estimate(self._speedup(agreement, layers, depth), depth) for depth in range(1, len(self.verify))),
            key=lambda estimate: estimate.speedup,
        )

    def _speedup(self, agreement: float, layers: int, depth: int) -> float:
        tokens = sum(agreement**level for level in range(depth + 1))  # per step, including the model's own
        return tokens * self.plain / (self.verify[depth] + depth * self.draft(layers))


def measure_costs(target: TargetView, tokens: Sequence[int], context: int, clock: Clock = time.perf_counter) -> Costs:
    """Medians over alternating passes after `context` rows of any content.

    `tokens` are real ones: in a mixture of experts they are routed differently.
    """
    table, every = PageTable(), range(target.config.layers)
    target.cache.reserve(table, context + DEEPEST + 1)
    kinds = [(1, range(0)), *((rows, every) for rows in range(1, DEEPEST + 2))]
    seconds: list[list[float]] = [[] for _ in kinds]
    with torch.inference_mode():
        for turn in range(_ROUNDS + 1):
            for times, (rows, layers) in zip(seconds, kinds, strict=True):
                chain = [tokens[(turn + row) % len(tokens)] for row in range(rows)]
                positions = np.arange(context, context + rows, dtype=np.int64)
                segment = Segment(table, context, chain, positions, np.tri(rows, dtype=np.bool_), 0)
                began = clock()
                target.run([segment], layers).logits.argmax(dim=1).tolist()  # synchronises with the device
                if turn:  # the first turn is the warm-up
                    times.append(clock() - began)
    target.cache.release(table)
    head, *verify = map(statistics.median, seconds)
    return Costs(target.config.layers, tuple(verify), head)
