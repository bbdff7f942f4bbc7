"""The KV cache of a draft model with another vocabulary: its own pages, one table per sequence.

Rows can be dropped at any time and fed again, so a full store is no error: idle sequences are evicted first, then the
youngest active ones, and a sequence without room does not draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from slipstream.attention import Segment
from slipstream.cache import PAGE_SIZE, PagedCache, PageTable
from slipstream.drafters.foreign.translate import agreeing
from slipstream.drafters.growing.catch_up import Text, catch_up, wanted
from slipstream.errors import CacheFull
from slipstream.models.model import Model


@dataclass(eq=False)
class Held:
    """One sequence's part: the tokens that have rows, and their pages."""

    ids: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)


class SeparateCache:
    """A cache with one store."""

    def __init__(self, model: Model, name: str, pages: int) -> None:
        self._model = model
        self._name = name
        self._cache = PagedCache(pages, model.device)
        model.add_store(self._cache, name)
        self._holding: dict[Held, None] = {}  # those with pages, least recently used first

    @property
    def bytes(self) -> int:
        """Memory size."""
        return sum(store.nbytes for store in self._cache.stores.values())

    @property
    def free(self) -> int:
        """Free pages."""
        return self._cache.available

    def hold(self, held: Held, ids: list[int], same: int, room: int, at_work: list[Held]) -> bool:
        """Keep the rows of the common prefix with `ids`, and reserve room for all of `ids` and `room` more.

        `same`: so many of the rows (or all, if fewer) are known to match `ids`. The last token is always fed again, for
        its logits. `at_work`: all active sequences, the oldest first. False if there is no room; then nothing is held.
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
        """Let other sequences share the rows of `final`: leading tokens that will never be taken back."""
        self._cache.publish(held.table, self._name, final)

    def release(self, held: Held) -> None:
        """Free all pages."""
        if held in self._holding:
            del self._holding[held]
            self._cache.release(held.table)
            held.ids = []

    def feed(self, pending: Seq[tuple[Held, list[int]]]) -> list[torch.Tensor]:
        """Feed tokens after what each holds, one chunk of each per pass; the logits [vocab] after the last ones."""
        texts = [Text(held.table, tokens, start=len(held.ids)) for held, tokens in pending]
        rows = catch_up(self._name, texts, self._pass)
        for held, tokens in pending:
            held.ids += tokens
        return [row[0] for row in rows]

    def _pass(self, _: list[Text], segments: list[Segment]) -> list[torch.Tensor]:
        return list(self._model.forward(self._cache, self._name, segments).logits.split(wanted(segments)))
