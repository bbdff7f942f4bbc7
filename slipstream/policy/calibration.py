"""What drafts are worth: confidences calibrated into the probability that a node is accepted given its parent.

Counts are kept by drafter, temperature class, depth and confidence, and halved now and then, so that they follow a
change of the traffic. They start from the confidence itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.policy.tally import BINS, Tally
from slipstream.tree import TokenTree
from slipstream.types import SamplingParams

_DEPTHS = (0, 1, 2, 2, 3, 3, 3, 3)  # class of depth 1, 2, ...; deeper ones are of the last class
_LAST = 4
_PRIOR = 6.0  # counts that the confidence itself is worth
_FULL = 4096.0  # offered nodes of a class after which its counts are halved
_WARM = 0.8  # temperatures up to here are of one class, those above of another

_TILT_PRIOR = 3.0  # accepted tokens that a request's tilt starts with
_TILT_KEPT = 0.9  # what each drafted step keeps of the counts before it
_TILTS = (0.25, 2.0)
_ALMOST_SURE = 0.995


def temperature_class(params: SamplingParams) -> int:
    """0: greedy, 1: up to a temperature of 0.8 or with a cut of the distribution, 2: above."""
    if params.greedy:
        return 0
    cut = params.top_p < 0.95 or 0 < params.top_k <= 64 or params.min_p >= 0.05
    return 1 if cut or params.temperature <= _WARM else 2


class Tilt:
    """How much more or less of a drafter's nodes this request accepts than calibration expects."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = self._expected = _TILT_PRIOR

    def add(self, expected: float, accepted: int) -> None:
        """A step whose nodes promised `expected` accepted tokens."""
        stay, fresh = _TILT_KEPT, (1 - _TILT_KEPT) * _TILT_PRIOR
        self._expected = stay * self._expected + fresh + expected
        self._accepted = stay * self._accepted + fresh + accepted

    @property
    def factor(self) -> float:
        """Factor on the probability of a node given its parent."""
        return min(_TILTS[1], max(_TILTS[0], self._accepted / self._expected))


class Calibration:
    """Counts of offered and accepted nodes, and the probabilities that follow from them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[list[list[float]]]] = {}  # [depth class][bin][offered, accepted]

    def _of(self, origin: str, temp_class: int) -> list[list[list[float]]]:
        found = self._counts.get((origin, temp_class))
        if found is None:
            found = [[[0.0, 0.0] for _ in range(BINS)] for _ in range(_LAST + 1)]
            self._counts[origin, temp_class] = found
        return found

    def acceptance(self, origin: str, temp_class: int, depth: int, confidence: float) -> float:
        """The probability that the target accepts a node whose parent it accepted."""
        counts = self._of(origin, temp_class)
        offered, accepted = counts[_depth_class(depth)][min(int(confidence * BINS), BINS - 1)]
        return (accepted + _PRIOR * confidence) / (offered + _PRIOR)

    def survivals(self, tree: TokenTree, temp_class: int, tilts: Mapping[str, Tilt]) -> list[float]:
        """For each node the probability that it is on the accepted path; the root's is 1. Scouts have none."""
        found = [1.0]
        parents, confidence, depths, origins, scouts = (
            tree.parents,
            tree.confidence,
            tree.depths,
            tree.origins,
            tree.scouts,
        )
        for node in range(1, len(parents)):
            parent = parents[node]
            if scouts[node]:
                found.append(0.0)
                continue
            above, origin = confidence[parent], origins[node] or ""
            given = confidence[node] / above if above > 0.0 else 0.0
            accepted = self.acceptance(origin, temp_class, depths[node], min(1.0, given))
            tilt = tilts.get(origin)
            if tilt is not None:
                accepted = min(_ALMOST_SURE, accepted * tilt.factor)
            found.append(found[parent] * accepted)
        return found

    def add_tree(self, tree: TokenTree, path: Sequence[int], temp_class: int) -> None:
        """Count the nodes of a verified tree whose parents were accepted; `path`: the accepted nodes."""
        accepted = {0, *path}
        parents, confidence, origins, depths = tree.parents, tree.confidence, tree.origins, tree.depths
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent in accepted and not tree.scouts[node]:
                above = confidence[parent]
                given = min(1.0, confidence[node] / above) if above > 0.0 else 0.0
                place = self._of(origins[node] or "", temp_class)[_depth_class(depths[node])]
                _count(place[min(int(given * BINS), BINS - 1)], 1.0, float(node in accepted))

    def add_tally(self, tally: Tally, temp_class: int) -> None:
        """Count what a device counted itself."""
        for origin, counts in tally.counts.items():
            for depth, bins in enumerate(counts.tolist(), 1):
                places = self._of(origin, temp_class)[_depth_class(depth)]
                for place, (offered, accepted) in zip(places, bins, strict=True):
                    _count(place, offered, accepted)

    def state(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {
            f"{origin}|{temp_class}": [[[round(n, 1) for n in pair] for pair in bins] for bins in counts]
            for (origin, temp_class), counts in self._counts.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what `state` gave."""
        for key, counts in state.items():
            origin, _, temp_class = key.rpartition("|")
            self._counts[origin, int(temp_class)] = [[[float(n) for n in pair] for pair in bins] for bins in counts]


def _count(place: list[float], offered: float, accepted: float) -> None:
    place[0] += offered
    place[1] += accepted
    if place[0] > _FULL:
        place[0] /= 2
        place[1] /= 2


def _depth_class(depth: int) -> int:
    return _DEPTHS[depth - 1] if depth <= len(_DEPTHS) else _LAST
