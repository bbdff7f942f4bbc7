"""What a runner reports about finished passes: the same for host steps and device rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.policy.tally import Tally
from slipstream.sampling import TreeDistributions
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree


class Round(NamedTuple):
    """One target pass for one sequence: the accepted path and the target's own token after it.

    `steps` consecutive rounds without trees, of one token each, may be reported as one.
    """

    tokens: list[int]
    origins: Seq[str | None] = ()  # drafters of the accepted tokens; the target's own token has none
    drafted: int = 0  # nodes that were offered
    deepest: int = 0  # levels of the tree
    steps: int = 1
    nodes: Seq[int] = ()  # the accepted path in the tree of `target`
    target: TreeDistributions | None = None  # for logprobs, if the host has the logits
    offered: Seq[str | None] = ()  # on the host: the drafters of the nodes that were offered


@dataclass
class Progress:
    """One sequence's part of a report. The emitter consumes `rounds` and counts `new_tokens`."""

    sequence: Sequence
    rounds: list[Round] = field(default_factory=list)
    new_tokens: int = 0
    trees: list[TokenTree] = field(default_factory=list)  # of its rounds, if the request is traced


@dataclass(frozen=True)
class Report:
    """Finished passes. A burst is reported in two parts, so that the host emits while the device runs."""

    progress: list[Progress]
    rows: int = 0  # of the target passes, over all sequences
    draft_ms: float = 0.0
    verify_ms: float = 0.0  # target pass and verification
    tally: Tally = field(default_factory=Tally)

    def charge(self, sequences: int, other_ms: float) -> None:
        """Split the time evenly over `sequences` sequences, and add it to the stats of those reported here."""
        for item in self.progress:
            stats = item.sequence.stats
            stats.draft_ms += self.draft_ms / sequences
            stats.verify_ms += self.verify_ms / sequences
            stats.other_ms += other_ms / sequences
