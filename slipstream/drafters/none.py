"""`none`: plain decoding. It drafts nothing and takes the same path through the engine as every other drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.tree import TokenTree


@dataclass(frozen=True)
class NoneOptions(DraftOptions):
    """No options."""

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
    summary = "plain decoding: no draft, one token per step"
    helps = "the baseline of every speed-up"
    cost = "nothing"
    options_type = NoneOptions

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [TokenTree(request.sequence.tokens[-1]) for request in requests]
