"""The search for layers to skip: first greedy elimination, then local changes.

The result is a frontier: for every number of layers the subset that agrees best with the whole model. The search knows
no model and no clock. It requests agreements, rough ones first and exact ones of the best, until the time is up; apart
from that it is deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Layers = tuple[int, ...]  # in order

_FINALISTS = 3  # of a rough comparison
_HOPELESS = 0.1  # a draft that is wrong nine times in ten cannot pay: no more layers are removed from it


class Measure(Protocol):
    """How well a subset agrees with the whole model, 0 to 1."""

    def __call__(self, layers: Layers, *, rough: bool) -> float: ...


@dataclass(frozen=True)
class Point:
    """A subset of the layers and its agreement."""

    layers: Layers
    agreement: float


class _TimeIsUp(Exception):
    pass


class Search:
    """`score`: the value of a point; `expired` is checked before every measurement but the first."""

    def __init__(
        self,
        count: int,
        measure: Measure,
        score: Callable[[Point], float],
        expired: Callable[[], bool],
        seed: int = 0,
    ) -> None:
        self._every = tuple(range(count))
        self._measure = measure
        self._score = score
        self._expired = expired
        self._random = random.Random(seed)
        self._known: dict[tuple[Layers, bool], float] = {}
        self._best: dict[int, Point] = {}  # by the number of layers
        self._explored: set[Layers] = set()

    def run(self) -> list[Point]:
        """The frontier, few layers first: every point agrees better than all with fewer layers."""
        first = self._without(self._every, len(self._every) // 2)
        self._known[first, False] = self._measure(first, rough=False)  # before any deadline: there is always a result
        self._offer(first)
        try:
            self._eliminate()
            self._improve()
        except _TimeIsUp:
            pass
        frontier: list[Point] = []
        for _, point in sorted(self._best.items()):
            if not frontier or point.agreement > frontier[-1].agreement:
                frontier.append(point)
        return frontier

    # -- elimination
    # ----------------------------------------------------------------------------------------------------

    def _eliminate(self) -> None:
        """Repeatedly remove the layer that is missed least.

        The agreement without a layer hardly rises as others are removed. So layers are tried in the order of their last
        agreement, and those that were worse than the current finalists are skipped.
        """
        layers, left = self._every, dict.fromkeys(self._every, 1.0)
        while len(layers) > 1:
            tried: dict[int, float] = {}
            for layer in sorted(layers, key=lambda layer: -left[layer]):
                if len(tried) >= _FINALISTS and left[layer] <= sorted(tried.values())[-_FINALISTS]:
                    break
                left[layer] = tried[layer] = self._agreement(self._without(layers, layer), rough=True)
            finalists = sorted(tried, key=lambda layer: -tried[layer])[:_FINALISTS]
            points = [self._offer(self._without(layers, layer)) for layer in finalists]
            best = max(points, key=lambda point: point.agreement)
            if best.agreement < _HOPELESS:
                return
            layers = best.layers

    # -- local changes
    # --------------------------------------------------------------------------------------------------

    def _improve(self) -> None:
        """Search around the points of the frontier, the most promising first, until nothing near them is better."""
        while near := [point for point in self._best.values() if point.layers not in self._explored]:
            point = max(near, key=lambda point: (self._score(point), point.layers))
            if not any(self._replaces(layers) for layers in self._neighbours(point.layers)):
                self._explored.add(point.layers)

    def _neighbours(self, layers: Layers) -> list[Layers]:
        """One layer less, one more, or one replaced; in random order."""
        absent = [layer for layer in self._every if layer not in layers]
        less = [self._without(layers, layer) for layer in layers]
        more = [tuple(sorted((*layers, layer))) for layer in absent]
        other = [tuple(sorted((*fewer, layer))) for fewer in less for layer in absent]
        found = [subset for subset in (*less, *more, *other) if 0 < len(subset) < len(self._every)]
        self._random.shuffle(found)
        return found

    def _replaces(self, layers: Layers) -> bool:
        """Whether this subset replaces the best one of its size."""
        held = self._best.get(len(layers))
        if held is not None and (held.layers == layers or self._looks_worse(layers, held.layers)):
            return False
        self._offer(layers)
        return self._best[len(layers)].layers == layers

    def _looks_worse(self, layers: Layers, than: Layers) -> bool:
        return self._agreement(layers, rough=True) < self._agreement(than, rough=True)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _offer(self, layers: Layers) -> Point:
        """The point of a subset; recorded if it is the best of its size."""
        point = Point(layers, self._agreement(layers, rough=False))
        held = self._best.get(len(layers))
        if held is None or point.agreement > held.agreement:
            self._best[len(layers)] = point
        return point

    def _agreement(self, layers: Layers, *, rough: bool) -> float:
        if (layers, rough) not in self._known:
            if self._expired():
                raise _TimeIsUp
            self._known[layers, rough] = self._measure(layers, rough=rough)
        return self._known[layers, rough]

    @staticmethod
    def _without(layers: Layers, layer: int) -> Layers:
        return tuple(kept for kept in layers if kept != layer)
