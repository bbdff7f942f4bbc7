"""`suffix` alone on the device: chains of a text that repeats itself, and plain rounds where it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from slipstream.drafters.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.repeats import Repeats
from slipstream.lanes import Lanes
from slipstream.sequence import Sequence
from slipstream.types import Stats

if TYPE_CHECKING:
    from slipstream.drafters.suffix import SuffixDrafter

_WORTH_A_CHAIN = 2  # tokens of a match: behind a single one a chain is right too seldom for its rows
_MOST_WANTED = 16  # tokens of a match that gives a chain, whatever came of the chains before
_ROWS = 0.13  # what the rows of a chain cost of a plain round, where they read no more weights
_MATCH_FOR_COST = 2.5  # tokens of a match for each plain round that a chain's round costs more
_VENTURED, _DEAR_VENTURED = 4, 1  # rounds with chains that have not proved themselves
_DEAR = 1.0  # plain rounds that such a round costs more, from which on the second number holds


class Trust:
    """How long the matches of a text must be to be worth chains: one token more after a burst in vain, or one less."""

    def __init__(self) -> None:
        self._more = 0  # tokens beyond the least
        self._asks = False
        self._proved = False  # whether the last burst that was asked for was worth it
        self._began: tuple[int, int] | None = None  # steps and tokens before the last burst that was asked for

    def ask(self, matched: int, stats: Stats, least: int, worth: float) -> bool:
        """Whether a match of so many tokens is long enough; `stats`: of the text so far.

        `least`: tokens that a match must have at any rate; `worth`: tokens accepted in a round that make up for what it
        costs more than a plain one. Both depend on the company, which changes.
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
        """Whether it asks, and was right to do so the last time."""
        return self._asks and self._proved

    def begin(self, stats: Stats) -> None:
        """A burst with chains begins. Where another text of the batch asked for it, nothing is learnt from it."""
        self._began = (stats.steps, stats.emitted) if self._asks else None


class ChainDraft(DeviceDraft):
    """Chains of one length."""

    scratch = 0
    steady = False

    def __init__(self, drafter: SuffixDrafter, length: int, lanes: int) -> None:
        self._drafter = drafter
        self._trust = f"{drafter.key}.trust"
        self.nodes = self.depth = length
        config = drafter.target.config
        # Of a round, more than a plain one: in a mixture the rows of a chain read experts that a lone row does not.
        self._cost = config.weights_read(lanes * (1 + length)) / config.weights_read(lanes) - 1 + _ROWS
        self._least = max(_WORTH_A_CHAIN, drafter.options.min_match, math.ceil(_MATCH_FOR_COST * self._cost))

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        for sequence in sequences:
            self._trust_of(sequence).begin(sequence.stats)
        return True

    def expects(self, sequences: Seq[Sequence]) -> bool:
        how = self._least, self._cost
        asking = [self._trust_of(s).ask(self._drafter.matched(s), s.stats, *how) for s in sequences]
        return any(asking)

    def rounds(self, sequences: Seq[Sequence], most: int) -> int:
        proved = any(self._trust_of(sequence).proved for sequence in sequences)
        return most if proved else min(most, _DEAR_VENTURED if self._cost > _DEAR else _VENTURED)

    def _trust_of(self, sequence: Sequence) -> Trust:
        trust: Trust = sequence.drafting.setdefault(self._trust, Trust())
        return trust

    def loop(self, lanes: Lanes) -> ChainLoop:
        return ChainLoop(lanes, Repeats(lanes, self.nodes, self._drafter.options.min_match))


class ChainLoop(DeviceLoop):
    """Where a text has no match its lane offers some tokens all the same: a round has the rows anyway."""

    def __init__(self, lanes: Lanes, repeats: Repeats) -> None:
        self._lanes = lanes
        self._repeats = repeats
        lanes.parents[:, 1:] = torch.arange(lanes.nodes, device=lanes.device)

    def fill(self, sequences: Seq[Sequence]) -> None:
        self._repeats.fill(sequences)

    def draft(self, sampled: bool) -> None:
        chains, _ = self._repeats.chains()
        self._lanes.tokens[:, 1:] = chains

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Tokens are all it reads."""

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        """The text is all it keeps."""
