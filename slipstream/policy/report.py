"""What a runner reports about finished passes: the same for host steps and device rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slipstream.policy.tally import Tally
from slipstream.sampling import Spell
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Decision, Logprobs, Plan


class Scored(Protocol):
    """Gives the log-probabilities of a pass."""

    def logprobs(self, node: int, token: int, top: int, spell: Spell | None = None) -> Logprobs:
        """Log-probabilities of `token` and of the `top` likeliest tokens after `node`, of the raw distribution."""
        ...


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
    target: Scored | None = None  # for logprobs, if they were asked for
    offered: Seq[str | None] = ()  # on the host: the drafters of the nodes that were offered


class DraftCall(NamedTuple):
    """One call of a part of a drafter whose parts are planned apart."""

    drafter: str  # its label
    sequences: int
    levels: int
    ms: float
    read: int  # tokens that it had to read first
    short: bool = False  # one level was asked for


@dataclass
class Progress:
    """One sequence's part of a report. The emitter consumes `rounds` and counts `new_tokens`."""

    sequence: Sequence
    rounds: list[Round] = field(default_factory=list)
    new_tokens: int = 0
    trees: list[TokenTree] = field(default_factory=list)  # of its rounds, if the request is traced
    verified: tuple[TokenTree, Seq[int]] | None = None  # on the host: the tree and its accepted path
    decision: Decision | None = None  # the policy's, once it has seen the results


@dataclass(frozen=True)
class Report:
    """Finished passes. A burst is reported in two parts, so that the host emits while the device runs."""

    progress: list[Progress]
    rows: int = 0  # of the target passes, over all sequences
    prompt_rows: int = 0  # of them, tokens of prompts
    draft_ms: float = 0.0
    verify_ms: float = 0.0  # target pass and verification
    tally: Tally = field(default_factory=Tally)
    calls: Seq[DraftCall] = ()  # on the host; of a burst, the one that brought its drafter up to the roots
    cold: bool = False  # something was compiled or captured: the times say nothing
    burst: Plan | None = None  # on a device: the shape of its trees, and how many rounds were finished

    def charge(self, sequences: int, other_ms: float) -> None:
        """Split the time evenly over `sequences` sequences, and add it to the stats of those reported here."""
        for item in self.progress:
            stats = item.sequence.stats
            stats.draft_ms += self.draft_ms / sequences
            stats.verify_ms += self.verify_ms / sequences
            stats.other_ms += other_ms / sequences
