"""Rounds that were launched: all that is needed to read their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from slipstream.engine.extras import Extras, Level
from slipstream.engine.round_buffers import Collected, RoundBuffers, RoundTimer
from slipstream.policy import Progress
from slipstream.policy.report import DraftCall
from slipstream.sequence import Sequence
from slipstream.types import Plan


class Prepared(NamedTuple):
    """How a drafter was brought up to the roots before a burst."""

    drafter: str
    unread: int  # the most unread tokens of any sequence
    timer: RoundTimer

    @staticmethod
    def begun(drafter: str, unread: int, *, on_gpu: bool) -> Prepared:
        """A record whose timer starts now."""
        timer = RoundTimer(on_gpu=on_gpu)
        timer.mark()
        return Prepared(drafter, unread, timer)

    def call(self, sequences: int) -> DraftCall:
        """The call in the form of a report."""
        return DraftCall(self.drafter, sequences, 0, self.timer.milliseconds(1), self.unread)


@dataclass(frozen=True)
class Launched:
    """Rounds that are running or done."""

    buffers: RoundBuffers
    sequences: list[Sequence]
    lanes: list[int]  # of the sequences
    starts: list[int]  # slots of the roots of the first round
    collected: Collected
    most: int  # rounds that slots are reserved for
    began: float
    progress: list[Progress]
    extras: Extras | None = None  # if any sequence needs them
    rounds: int = 0
    may_go_ahead: bool = False
    prepared: Prepared | None = None
    cold: bool = False  # something was compiled or captured in its rounds

    def root_slots(self, rounds: int) -> list[int]:
        """Slots of the roots after `rounds` finished rounds."""
        counts = self.collected.token_counts(rounds)
        return [start + count for start, count in zip(self.starts, counts, strict=True)]

    @property
    def shape(self) -> Plan:
        """The shape of the trees."""
        lanes = self.buffers.lanes
        return Plan(lanes.depth, lanes.nodes, parts=self.buffers.kind or ())

    def calls(self) -> list[DraftCall]:
        """The call that brought the drafter up to the roots, if any; read once the first round is finished."""
        return [] if self.prepared is None else [self.prepared.call(len(self.sequences))]

    @property
    def level(self) -> Level:
        """The highest level that a sequence of these rounds needs."""
        return max(map(Level.of, self.sequences))

    @property
    def traced(self) -> bool:
        """Whether the trees of these rounds are kept."""
        return any(sequence.request.trace for sequence in self.sequences)
