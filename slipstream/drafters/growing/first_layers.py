"""The target's first layers as a draft model, and the reuse of their rows by verification.

The rows that a draft ran through the first layers are the rows that verification would compute there, so it may start
after them. The bits are the same only if the arithmetic is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slipstream.attention import Segment
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.errors import OptionError
from slipstream.models.model import PassOutput
from slipstream.tree import Prepared, TokenTree

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

REUSE = ("auto", "yes", "no")


def require_exit(method: str, exit: int, layers: int) -> None:
    """Refuse an exit that is not between two layers of the target."""
    if not 1 <= exit < layers:
        raise OptionError(f"{method}: exit={exit}", hint=f"the target has {layers} layers: 1 to {layers - 1}")


class FirstLayers:
    """The first `count` layers. `reuse`: verification starts after them, `auto` where that changes no bit."""

    def __init__(self, target: TargetView, count: int, reuse: str) -> None:
        self._target = target
        self._count = count
        self._reuse = reuse == "yes" or (reuse == "auto" and target.exact)

    def run(self, growths: Seq[Growth], segments: Seq[Segment]) -> PassOutput:
        """A pass, one segment per growth, whose hidden states are kept with it."""
        output = self._target.run(segments, range(self._count))
        for growth, hidden in zip(growths, output.hidden.split([s.rows for s in segments]), strict=True):
            growth.hidden.append(hidden)
        return output

    def prepare(self, growths: Seq[Growth], offers: Seq[TokenTree]) -> None:
        """Let verification start after these layers if the fed nodes are where the offered tree's rows will be.

        Nodes that are offered but were not fed are fed now, so that every row has passed these layers.
        """
        if not self._reuse:
            return
        pairs = [(g, offer) for g, offer in zip(growths, offers, strict=True) if g.extends_to(offer)]
        for growth, offer in pairs:
            growth.tree = offer
        if unfed := [growth for growth, offer in pairs if growth.fed < len(offer)]:
            self.run(unfed, [silent(growth.segment()) for growth in unfed])
        for growth, offer in pairs:
            offer.prepared = Prepared(self._count, torch.cat(growth.hidden))


def silent(segment: Segment) -> Segment:
    """The segment without requests for logits: only its hidden states are wanted."""
    return replace(segment, logits_from=segment.rows)
