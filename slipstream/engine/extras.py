"""How much rounds compute to choose tokens; the buffers of the highest level: adjustments and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from slipstream.gpu.adjustments import Adjustments
from slipstream.gpu.lane_scores import LaneScores
from slipstream.gpu.lanes import Lanes
from slipstream.sampling import Spell
from slipstream.sequence import Sequence
from slipstream.types import Logprob, Logprobs


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory that the device copies to; on a CPU the tensor itself."""
    if not tensor.is_cuda or not tensor.numel():
        return tensor.cpu()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class Level(IntEnum):
    """How much the rounds of a batch compute to choose tokens: what its most demanding sequence needs."""

    GREEDY = 0
    SAMPLED = 1  # noise
    CUT = 2  # min-p, top-k, top-p
    ALL = 3  # penalties, bias, masks, log-probabilities

    @staticmethod
    def of(sequence: Sequence) -> Level:
        """The level that a sequence needs."""
        params = sequence.params
        if params.adjusts or params.logprobs is not None:
            return Level.ALL
        return Level.CUT if params.cuts else Level.GREEDY if params.greedy else Level.SAMPLED


class Extras:
    """The buffers that only rounds of level ALL have: adjustments and log-probabilities."""

    def __init__(self, lanes: Lanes, lines: int, vocabulary: int) -> None:
        self.adjustments = Adjustments(lanes, vocabulary)
        self.scores = LaneScores(lanes, lines)
        self._hosts = on_host(self.scores.values), on_host(self.scores.ids)

    def fill(self, sequences: Mapping[int, Sequence | None]) -> None:
        """Set lanes up for these sequences; None: a free lane."""
        self.adjustments.fill(sequences)
        self.scores.fill(sequences)

    def send(self, line: int) -> None:
        """Queue the copy of a round's log-probabilities to the host."""
        for host, device in zip(self._hosts, (self.scores.values, self.scores.ids), strict=True):
            host[line].copy_(device[line], non_blocking=True)

    def read(self, line: int, lane: int) -> PathScores:
        """The log-probabilities of a lane in a finished round."""
        return PathScores(*(host[line, lane].tolist() for host in self._hosts))


@dataclass(frozen=True)
class PathScores:
    """Log-probabilities along the accepted path of a round, as `LaneScores` lays them out."""

    values: list[list[float]]
    ids: list[list[int]]

    def logprobs(self, node: int, token: int, top: int, spell: Spell | None = None) -> Logprobs:
        """Log-probabilities of `token`, chosen after node `node` of the path, and of the `top` likeliest tokens."""
        values, (rank, *ids) = self.values[node], self.ids[node]
        found = {token: (values[0], rank)} | {
            id: (value, place) for place, (id, value) in enumerate(zip(ids[:top], values[1:], strict=False), 1)
        }
        return {id: Logprob(value, place, spell(id) if spell else None) for id, (value, place) in found.items()}
