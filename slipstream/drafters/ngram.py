"""`ngram`: prompt lookup. What followed the last n tokens at their previous occurrence is offered as a chain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class NgramOptions(DraftOptions):
    """Longest match first, down from `max_n` to `min_n` tokens; the most recent occurrence wins."""

    depth: int = 8
    nodes: int = 8
    branch: int = 1
    min_n: int = 2
    max_n: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.min_n >= 1, "min_n", "1 or more")
        self.require(self.max_n >= self.min_n, "max_n", f"min_n ({self.min_n}) or more")
        self.require(self.min_confidence == 0.0, "min_confidence", "0: `ngram` has no estimate of its own")
        self.require(self.branch == 1, "branch", "1: `ngram` offers one chain (`suffix` offers trees)")


@dataclass
class _Index:
    """Where each n-gram of a sequence ended last; `seen`: tokens indexed."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    seen: int = 0


class NgramDrafter(Drafter[NgramOptions]):
    """Look the last few tokens up in the text so far."""

    name = "ngram"
    summary = "prompt lookup: what followed the last n tokens at their previous occurrence"
    helps = "copying, editing, summaries, code; on text that never repeats it drafts nothing"
    cost = "a dictionary look-up"
    options_type = NgramOptions

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._one(request.sequence, request.plan) for request in requests]

    def _one(self, sequence: Sequence, plan: Plan) -> TokenTree:
        tokens = sequence.tokens
        index: _Index = sequence.drafting.setdefault(self.key, _Index())
        found = self._match(tokens, sequence.settled, index)
        draft = tokens[found : found + min(plan.depth, plan.nodes)] if found else []
        return TokenTree.chain(tokens[-1], draft, origin=self.name)

    def _match(self, tokens: list[int], settled: int, index: _Index) -> int | None:
        """Start of the tokens that followed the longest earlier match."""
        sizes = range(self.options.min_n, self.options.max_n + 1)
        # N-grams that end before the last token are indexed now: the last ones must not match themselves.
        final = min(settled, len(tokens) - 1)
        for end in range(index.seen, final):
            for size in sizes:
                if end + 1 >= size:
                    index.ends[tuple(tokens[end + 1 - size : end + 1])] = end
        index.seen = max(index.seen, final)
        for size in reversed(sizes):
            found = index.ends.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if found is not None:
                return found + 1
        return None
