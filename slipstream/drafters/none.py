"""`none`: plain decoding. It drafts nothing and walks the same path through the engine as every other drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.drafters.base import Drafter, DraftOptions, Wish
from slipstream.tree import TokenTree


@dataclass(frozen=True)
class NoneOptions(DraftOptions):
    """Nothing to set."""

    depth: int = 0
    nodes: int = 0
    branch: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in (("depth", 0), ("nodes", 0), ("branch", 1), ("min_confidence", 0.0)):
            self.require(getattr(self, name) == only, name, f"{only}: `none` never drafts")


class NoDrafter(Drafter[NoneOptions]):
    """Draft nothing."""

    name = "none"
    summary = "plain decoding: no draft, one token a step"
    helps = "the baseline every speed-up is measured against"
    cost = "nothing"
    options_type = NoneOptions

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        return [TokenTree(wish.sequence.tokens[-1]) for wish in wishes]
