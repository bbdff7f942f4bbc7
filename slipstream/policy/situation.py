"""What is known of sequences before a step is decided, and a decision that holds while that stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from slipstream.policy.record import Pending, Way
from slipstream.sequence import Sequence
from slipstream.types import Plan

_STEPS, _PLAIN_STEPS = 3, 7  # steps for which a decision to draft, and one not to draft, holds
LITTLE_ROOM = 24  # tokens: near the end of an answer every draft is decided anew
_LONG_MATCH = 3  # class of match
# After so many plain decisions of a batch in a row, so many steps pass between two looks at signals; after so many
# looks it is decided anew.
_PLAIN_IN_A_ROW, _BLIND_STEPS, _LOOKS = 2, 10, 2


class Signals(NamedTuple):
    """What is known of a sequence before anything is decided."""

    free: Way  # drafters that found something to draft from
    models: Way
    matched: int  # tokens of the longest match in the text
    match: int  # its class
    room: int  # tokens that can still be drafted
    certain: int = 0  # tokens that a drafter is sure of


@dataclass
class Kept:
    """A decision that holds for a few steps, unless something is new: deciding costs time, too."""

    sequences: list[Sequence]
    signals: list[Signals]
    plans: dict[Sequence, Plan]
    pending: dict[Sequence, Pending]
    plain_in_a_row: int = 0  # decisions not to draft, one after another, with this one

    def __post_init__(self) -> None:
        self._drafts = any(item.way for item in self.pending.values())
        steady = self.plain_in_a_row > _PLAIN_IN_A_ROW and not any(seen.certain for seen in self.signals)
        # Steps after each look at signals for which the decision holds, whatever the signals would say.
        self._blind = _BLIND_STEPS if steady and len(self.sequences) > 1 else 0
        self._blind_steps = self._blind
        self.steps = _STEPS if self._drafts else _LOOKS if self._blind else _PLAIN_STEPS  # left
        self._room = max(LITTLE_ROOM, *(plan.depth for plan in self.plans.values()))

    def holds_blindly(self, sequences: list[Sequence]) -> bool:
        """Whether it holds without a look at signals: where drafting does not pay, even signals cost too much."""
        if self._blind_steps == 0 or sequences != self.sequences:
            return False
        self._blind_steps -= 1
        return True

    def holds(self, sequences: list[Sequence], signals: list[Signals]) -> bool:
        """Whether these sequences are still in the same situation, for one more step. Only longer matches in the text
        and tokens that a drafter is sure of make a new decision necessary.
        """
        if self.steps <= 0 or sequences != self.sequences:
            return False
        for now, before in zip(signals, self.signals, strict=True):
            longer = max(now.match, before.match) >= _LONG_MATCH and now.match != before.match
            news = longer or now.certain > 0 or before.certain > 0 or now.models != before.models
            if news or (self._drafts and now.room < self._room):
                return False
        self.steps -= 1
        self._blind_steps = self._blind
        return True
