"""Trained drafters whose rows stay right: what a row is made of is known for good when it is made.

The K/V of a stack of layers lie in a store of the drafter's own. `propose` feeds the tokens that the stack has not seen
(one pass for all sequences), then a pass for every level of the trees. `observe` keeps the rows of the accepted path
and forgets the others, so nothing that was accepted is computed twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

import torch

from slipstream.attention import Segment, Tiles
from slipstream.cache import PagedCache
from slipstream.drafters.base import Outcome
from slipstream.drafters.head import Head
from slipstream.drafters.head_rows import LanedRows, PagedRows
from slipstream.drafters.layer_stack import PagedStack, StackHead
from slipstream.drafters.learned import LearnedDrafter, LearnedOptions
from slipstream.drafters.levels import Growth
from slipstream.lanes import LaneRows
from slipstream.models.rope import RopeTable
from slipstream.sequence import Sequence

Options = TypeVar("Options", bound=LearnedOptions)


class KeepingDrafter(LearnedDrafter[Options], Generic[Options]):
    """Draft by passes of a stack of layers."""

    # -- what a method has to say -------------------------------------------------------------------------------------

    @abstractmethod
    def _entered(self, growths: list[Growth], segments: list[Segment], rows: PagedRows) -> torch.Tensor:
        """What goes into the stack for the rows of a pass, [rows, width]; a segment for each growth."""

    def _ready(self, growth: Growth) -> bool:
        """Whether everything is there that a draft for this sequence has to read."""
        return growth.plan.drafts

    # -- passes -------------------------------------------------------------------------------------------------------

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, StackHead)
        self._stack = PagedStack(head, self.target.dtype, self.target.device)

    def attach(self, cache: PagedCache) -> None:
        config = self.target.config
        self._cache = cache
        self._rope = RopeTable(config, self.target.device)
        cache.add_store(self.key, len(self._stack), 2, config.kv_heads, config.head_dim, self.target.dtype)

    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        waiting, rows = [g for g in growths if self._ready(g)], dict[int, torch.Tensor]()
        while waiting:
            segments = [growth.unseen(growth.sequence.table.lengths[self.key]) for growth in waiting]
            wanted = iter(self._pass(waiting, segments).split(1))
            for growth, segment in zip(waiting, segments, strict=True):
                segment.table.lengths[self.key] = segment.committed + segment.rows
                if segment.logits_from < segment.rows:
                    rows[id(growth)] = next(wanted)
                    growth.fed = 1
            waiting = [growth for growth in waiting if id(growth) not in rows]
        return [rows.get(id(g)) for g in growths]

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self._pass(growths, [growth.segment() for growth in growths])

    def _pass(self, growths: list[Growth], segments: list[Segment]) -> torch.Tensor:
        rows = PagedRows(segments, self.target.config, self._rope, self.target.device, self.target.dtype)
        return self._stack(self._entered(growths, segments, rows), rows, self._cache.layers(self.key))

    def laned(self, tokens: torch.Tensor, rows: LaneRows, tiles: Tiles) -> torch.Tensor:
        """The stack's output for tokens [rows] that are rows of lanes, [rows, width]."""
        placed = LanedRows(rows, tiles, self.target.config, self._rope, self.target.device)
        return self._stack.run(self.target.embed(tokens), placed, self._cache.layers(self.key))

    def judged(self, output: torch.Tensor) -> torch.Tensor:
        """The stack's output [rows, width] -> logits [rows, draft tokens]."""
        return self._stack.judge(output)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            growth: Growth | None = outcome.sequence.drafting.pop(self.key, None)
            if growth is None or growth.fed == 0:
                continue
            slots = [growth.root_slot + node for node in growth.kept(outcome.tokens)]
            self._cache.commit(outcome.sequence.table, self.key, growth.root_slot + 1, slots)

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._cache.truncate(sequence.table, self.key, length)
