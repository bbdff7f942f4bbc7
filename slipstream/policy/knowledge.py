"""What a policy knows of the host's steps: what passes and drafts cost, and what drafts are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.policy.calibration import Calibration
from slipstream.policy.choice import Estimate
from slipstream.policy.costs import Curve, DraftCosts, PassCosts
from slipstream.policy.record import Record
from slipstream.sequence import Sequence

_UNKNOWN_CALL = 0.1  # cost of a drafter's call, in plain passes


class Knowledge:
    """Costs, calibration and record."""

    def __init__(self, shape: Callable[[int], float]) -> None:
        """`shape`: a guess at the cost of a pass by its rows."""
        self.costs = PassCosts(shape)
        self.draft_costs = DraftCosts()
        self.worth = Calibration()
        self.record = Record()

    def curve(self, sequences: Seq[Sequence]) -> Curve:
        """The cost of a decoding pass over these sequences."""
        context = sum(len(sequence.tokens) for sequence in sequences) // len(sequences)
        return self.costs.curve(len(sequences), context)

    def calls(self, offers: Seq[Seq[Estimate]], plain_ms: float) -> dict[str, float]:
        """The cost of a call of each drafter whose call the sequences share. `plain_ms`: of a step without drafts."""
        labels = {pick.shared for offer in offers for pick in offer}
        guess = _UNKNOWN_CALL * plain_ms
        return {label: self.draft_costs.call(label, len(offers), guess) for label in labels if label is not None}

    def state(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {
            "passes": self.costs.state(),
            "drafts": self.draft_costs.state(self.costs.pace),
            "worth": self.worth.state(),
            "record": self.record.state(),
        }

    def restore(self, state: Mapping[str, Any], *, doubted: bool) -> None:
        """Read what `state` gave. A shipped state has no costs, because they depend on the machine.

        `doubted`: the first measurements correct the costs; without it, no measurements follow.
        """
        self.worth.restore(state["worth"])
        self.record.restore(state["record"])
        if "passes" in state:
            self.costs.restore(state["passes"])
            self.draft_costs.restore(state["drafts"], doubted=doubted)
