"""`early_exit`: the first layers of the target, with its own norm and head, draft for the whole.

The rows that a draft has run through the first layers are the very rows that verification would compute there, so it
may begin behind them (`reuse`). Their bits are the same only where a row does not depend on the pass it rides in;
elsewhere verification runs all layers unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from slipstream.attention import Segment
from slipstream.drafters.base import Wish
from slipstream.drafters.levels import Growth, GrowthOptions
from slipstream.drafters.self_draft import SelfDrafter
from slipstream.errors import OptionError
from slipstream.tree import Prepared, TokenTree

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class EarlyExitOptions(GrowthOptions):
    """`exit`: how many layers the draft runs (0: a third of them). `reuse`: verification begins behind those layers,
    `auto` where that changes no bit, `yes` always, `no` never. `nodes` and `draw` are those of `draft_model`.
    """

    exit: int = 0
    reuse: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.exit >= 0, "exit", "1 to the number of layers minus 1, or 0 for a third of them")
        self.require(self.reuse in ("auto", "yes", "no"), "reuse", "auto, yes, no")


class EarlyExitDrafter(SelfDrafter[EarlyExitOptions]):
    """Draft with the first layers."""

    name = "early_exit"
    summary = "the first layers of the target and its own head"
    helps = "targets that were trained to exit early; others agree too rarely with their own first layers"
    cost = "one pass over the first layers and the head per level; no memory"
    options_type = EarlyExitOptions

    def __init__(self, options: EarlyExitOptions, target: TargetView) -> None:
        super().__init__(options, target)
        count = target.config.layers
        self._exit = options.exit or max(1, count // 3)
        if not 1 <= self._exit < count:
            raise OptionError(f"early_exit: exit={self._exit}", hint=f"the target has {count} layers: 1 to {count - 1}")
        self._reuse = options.reuse == "yes" or (options.reuse == "auto" and target.exact)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self._exit))

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        growths = self._grow(wishes)
        offers = [self._offer(growth) for growth in growths]
        if self._reuse:
            self._prepare([(g, offer) for g, offer in zip(growths, offers, strict=True) if g.extends_to(offer)])
        return offers

    def _prepare(self, pairs: list[tuple[Growth, TokenTree]]) -> None:
        """Feed the nodes that are offered but were not needed to go on, so that every row has been through."""
        for growth, offer in pairs:
            growth.tree = offer
        if unfed := [growth for growth, offer in pairs if growth.fed < len(offer)]:
            self._pass(unfed, [replace(s, logits_from=s.rows) for s in (growth.segment() for growth in unfed)])
        for growth, offer in pairs:
            offer.prepared = Prepared(self._exit, torch.cat(growth.hidden))

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self._pass(growths, [growth.segment() for growth in growths])

    def _pass(self, growths: list[Growth], segments: list[Segment]) -> torch.Tensor:
        """A pass whose rows are kept; the logits of those that want them."""
        output = self.target.run(segments, self.layers)
        for growth, hidden in zip(growths, output.hidden.split([s.rows for s in segments]), strict=True):
            growth.hidden.append(hidden)
        return output.logits
