"""When a match in the text is worth drafting a chain on the device, decided by its length before any cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.types import Stats

_WORTH_A_CHAIN = 2  # tokens of a match: after a single one, chains are rejected too often
_MOST_WANTED = 16  # tokens of a match that always gives a chain, whatever happened to earlier chains
_ROWS = 0.13  # cost of a chain's rows relative to a plain round, if they read no more weights
_MATCH_FOR_COST = 2.5  # tokens of a match per plain round that a round with chains costs extra
_TRIAL_ROUNDS, _EXPENSIVE_TRIAL_ROUNDS = 4, 1  # rounds with chains until some were accepted
_EXPENSIVE = 1.0  # extra cost of such a round, in plain rounds, above which the second number applies


class Signal(NamedTuple):
    """What a drafter knows at no cost before it drafts."""

    matched: int  # tokens of the longest suffix that occurred before
    least: int  # the shortest match that its options allow
    certain: int = 0  # tokens that it is sure of


@dataclass(frozen=True)
class ChainCost:
    """The extra cost of a round with chains, in plain rounds."""

    extra: float

    @staticmethod
    def of(weights_plain: float, weights_chain: float) -> ChainCost:
        """From the weights that a round reads without and with chains: in an MoE, more rows activate more experts."""
        return ChainCost(weights_chain / weights_plain - 1 + _ROWS)

    def least_match(self, allowed: int) -> int:
        """The shortest match that may give a chain; `allowed`: by the options."""
        return max(_WORTH_A_CHAIN, allowed, math.ceil(_MATCH_FOR_COST * self.extra))

    @property
    def trial_rounds(self) -> int:
        """Rounds with chains until some were accepted."""
        return _EXPENSIVE_TRIAL_ROUNDS if self.extra > _EXPENSIVE else _TRIAL_ROUNDS


class Trust:
    """The shortest match that is worth a chain: one token longer after a burst that did not pay, else one shorter."""

    def __init__(self) -> None:
        self._more = 0  # tokens above the minimum
        self._asks = False
        self._proved = False  # whether the last burst that it asked for paid
        self._began: tuple[int, int] | None = None  # steps and tokens before that burst

    def ask(self, matched: int, stats: Stats, least: int, worth: float) -> bool:
        """Whether a match of `matched` tokens is long enough; `stats`: of the sequence so far.

        `least`: the shortest match that may give a chain; `worth`: accepted tokens per round that pay for its
        extra cost. Both depend on the batch, which changes.
        """
        if self._began is not None and stats.steps > self._began[0]:
            rounds, tokens = stats.steps - self._began[0], stats.emitted - self._began[1]
            self._proved = tokens - rounds >= worth * rounds
            self._more = max(0, self._more - 1 if self._proved else min(self._more + 1, _MOST_WANTED - least))
            self._began = None
        self._asks = matched >= least + self._more
        return self._asks

    @property
    def proved(self) -> bool:
        """Whether the sequence asks for a chain, and the last burst with chains that it asked for paid."""
        return self._asks and self._proved

    def begin(self, stats: Stats) -> None:
        """Note that a burst with chains begins. If only another sequence asked for it, nothing is learnt from it."""
        self._began = (stats.steps, stats.emitted) if self._asks else None
