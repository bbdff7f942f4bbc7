"""Counts of accepted nodes by drafter, depth and confidence: the input of calibration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from slipstream.tree import TokenTree

BINS = 8  # of equal width, over the probability of a node given its parent
OFFERED, ACCEPTED = 0, 1  # a node counts as offered if its parent was accepted

_MANY = 65_536  # offered nodes of a drafter

Counts = npt.NDArray[np.int64]  # [depth, BINS, 2]


class Tally:
    """Counts by drafter: [depth - 1, bin, offered or accepted]."""

    def __init__(self, counts: Mapping[str, Counts] | None = None) -> None:
        self.counts: dict[str, Counts] = dict(counts or {})

    def add_tree(self, tree: TokenTree, path: Iterable[int]) -> None:
        """Count the nodes of a verified tree whose parents were accepted; `path`: the accepted nodes."""
        accepted = {0, *path}
        parents, confidence = tree.parents, tree.confidence
        for node in range(1, len(tree)):
            parent = parents[node]
            if parent in accepted and not tree.scouts[node]:
                given = confidence[node] / confidence[parent] if confidence[parent] > 0.0 else 0.0
                counts = self._room(tree.origins[node] or "", tree.depths[node])
                place = counts[tree.depths[node] - 1, min(int(given * BINS), BINS - 1)]
                place[OFFERED] += 1
                place[ACCEPTED] += node in accepted

    def add(self, other: Tally) -> None:
        """Add the counts of another."""
        for origin, counts in other.counts.items():
            self._room(origin, len(counts))[: len(counts)] += counts

    def age(self) -> None:
        """Halve the counts where they are many, so that they follow a change of the traffic."""
        for counts in self.counts.values():
            if counts[..., OFFERED].sum() > _MANY:
                counts //= 2

    def _room(self, origin: str, depth: int) -> Counts:
        known = self.counts.get(origin)
        if known is None or len(known) < depth:
            wider = np.zeros((depth, BINS, 2), dtype=np.int64)
            if known is not None:
                wider[: len(known)] = known
            self.counts[origin] = known = wider
        return known


def left_to_smaller(tally: Tally, depth: int, share: float) -> float:
    """The fraction of the accepted nodes that trees of `depth` levels with a `share` of the nodes would have kept.

    They lack the least likely nodes.
    """
    deep = sum(counts[..., ACCEPTED].sum() for counts in tally.counts.values())
    if deep == 0:
        return 1.0
    room = share * sum(counts[..., OFFERED].sum() for counts in tally.counts.values())
    bins = sum((counts[:depth].sum(0) for counts in tally.counts.values()), np.zeros((BINS, 2), dtype=np.int64))
    kept = 0.0
    for offered, accepted in bins[::-1].tolist():  # the likeliest first
        part = min(1.0, room / offered) if offered else 0.0
        kept, room = kept + part * accepted, room - part * offered
    return float(kept / deep)
