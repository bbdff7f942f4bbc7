"""K/V of a draft model whose tokens are not the target's: pages of its own, a table per sequence.

What a sequence holds here can be thrown away at any time and fed again, so a full store is no error: sequences that are
not at work make room, then the youngest of those that are, and who finds none does without.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache, PageTable
from slipstream.drafters.translate import agreeing
from slipstream.errors import CacheFull
from slipstream.models.model import Model
from slipstream.tree import TokenTree

_CHUNK = 512  # tokens fed per pass and sequence


@dataclass(eq=False)
class Held:
    """One sequence's part: the tokens whose rows are there, and the pages that they lie in."""

    ids: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)


class OwnStore:
    """A cache with one store."""

    def __init__(self, model: Model, name: str, pages: int) -> None:
        self._model = model
        self._name = name
        self._cache = PagedCache(pages, model.device)
        model.add_store(self._cache, name)
        self._holding: dict[Held, None] = {}  # who has pages, the least recently used first

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._cache.available

    def hold(self, held: Held, ids: list[int], same: int, room: int, at_work: list[Held]) -> bool:
        """Keep of the rows there those that `ids` begins with, and have room for all of them and `room` more.

        `same`: so many of the rows there (or all, if there are fewer) are known to be what `ids` begins with. The last
        token always has to be fed, for the logits behind it. `at_work`: all that want to hold something now, the oldest
        first, each in its turn. False if there is no room; then nothing is held.
        """
        if held not in self._holding:
            held.table = self._cache.open(ids)
            held.ids = ids[: held.table.lengths[self._name]]
        self._holding.pop(held, None)
        self._holding[held] = None
        if not self._reserve(held, len(ids) + room, at_work):
            self.release(held)
            return False
        start = min(same, len(held.ids))
        kept = min(start + agreeing(held.ids[start:], ids[start:]), len(ids) - 1)
        self._cache.truncate(held.table, self._name, kept)
        del held.ids[kept:]
        return True

    def _reserve(self, held: Held, rows: int, at_work: list[Held]) -> bool:
        while rows <= self._cache.capacity * PAGE_SIZE:
            try:
                self._cache.reserve(held.table, rows)
                return True
            except CacheFull:
                idle = [other for other in self._holding if other not in at_work]
                younger = [other for other in reversed(at_work[at_work.index(held) + 1 :]) if other in self._holding]
                if not idle and not younger:
                    break
                self.release((idle + younger)[0])
        return False

    def share(self, held: Held, final: list[int]) -> None:
        """Let other sequences begin with the rows of `final`: tokens at the beginning that will never be taken back."""
        self._cache.share(held.table, self._name, final)

    def release(self, held: Held) -> None:
        """Give all pages back."""
        if held in self._holding:
            del self._holding[held]
            self._cache.release(held.table)
            held.ids = []

    def feed(self, pending: Seq[tuple[Held, list[int]]]) -> list[torch.Tensor]:
        """Feed tokens behind what each holds, a chunk of all in every pass; the logits [vocab] behind the last ones."""
        rows: dict[Held, torch.Tensor] = {}
        waiting = list(pending)
        while waiting:
            segments = [self._segment(held, tokens) for held, tokens in waiting]
            logits = iter(self._model.forward(self._cache, self._name, segments).logits)
            for (held, tokens), segment in zip(waiting, segments, strict=True):
                held.ids += segment.tokens
                held.table.lengths[self._name] = len(held.ids)
                if segment.rows == len(tokens):
                    rows[held] = next(logits)
            waiting = [(held, tokens[_CHUNK:]) for held, tokens in waiting if len(tokens) > _CHUNK]
        return [rows[held] for held, _ in pending]

    @staticmethod
    def _segment(held: Held, tokens: list[int]) -> Segment:
        chunk = tokens[:_CHUNK]
        root = TokenTree(chunk[-1]) if len(chunk) == len(tokens) else None
        return tree_segment(held.table, len(held.ids), chunk, root)
