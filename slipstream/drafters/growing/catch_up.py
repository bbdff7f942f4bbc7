"""Catch-up: feed a model the tokens that it has not seen, one chunk per text and pass, up to the roots of the trees.

The model's drafter says how a pass runs and what it keeps; this module decides what is fed and counts the store's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, TypeVar

from slipstream.attention import Segment, chain_segment, tree_segment
from slipstream.cache import PageTable
from slipstream.tree import TokenTree

CHUNK = 512  # tokens of a text fed per pass


class Unseen(Protocol):
    """Something that a model may have seen in part."""

    def unseen(self, store: str) -> Segment:
        """The next chunk without rows in the store; the last one ends in a tree and requests its logits."""


@dataclass(frozen=True)
class Text:
    """Tokens from slot `start` on; the last one is a root: of `tree`, or followed by `blanks` rows without a token."""

    table: PageTable
    tokens: list[int]
    tree: TokenTree | None = None
    start: int = 0
    blanks: int = 0

    def unseen(self, store: str) -> Segment:
        """The root is fed again if a proposal is repeated because the first one failed after this point."""
        seen = min(self.table.lengths[store] - self.start, len(self.tokens) - 1)
        piece = self.tokens[seen : seen + CHUNK]
        last = seen + len(piece) == len(self.tokens)
        if last and self.tree is None:
            return chain_segment(self.table, self.start + seen, piece + piece[-1:] * self.blanks, len(piece) - 1)
        return tree_segment(self.table, self.start + seen, piece, self.tree if last else None)


Item = TypeVar("Item", bound=Unseen)
Result = TypeVar("Result")


def catch_up(
    store: str, items: Seq[Item], run: Callable[[list[Item], list[Segment]], Iterable[Result]]
) -> list[Result]:
    """Feed everything without rows in the store; returns what `run` gave for each item's last chunk.

    `run`: a pass over the next chunks of the unfinished items, one result each. Rows after a root do not count as the
    sequence's yet.
    """
    results: dict[int, Result] = {}
    while waiting := [number for number in range(len(items)) if number not in results]:
        segments = [items[number].unseen(store) for number in waiting]
        made = run([items[number] for number in waiting], segments)
        for number, segment, result in zip(waiting, segments, made, strict=True):
            segment.table.lengths[store] = segment.committed + min(segment.rows, segment.logits_from + 1)
            if segment.logits_from < segment.rows:
                results[number] = result
    return [results[number] for number in range(len(items))]


def wanted(segments: Iterable[Segment]) -> list[int]:
    """Number of rows of each segment that request logits."""
    return [segment.rows - segment.logits_from for segment in segments]
