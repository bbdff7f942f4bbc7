"""Trained drafters whose rows stay valid: the inputs of a row are final when it is computed.

The K/V of a stack of layers are in the drafter's own store. `propose` feeds the tokens that the stack has not seen (one
pass for all sequences), then runs one pass per level of the trees. `observe` keeps the rows of the accepted path and
drops the others, so nothing accepted is computed twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

import torch

from slipstream.attention import Segment, Tiles
from slipstream.cache import PagedCache
from slipstream.drafters.base import Outcome
from slipstream.drafters.growing.catch_up import catch_up, wanted
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.head import Head
from slipstream.drafters.heads.head_drafter import HeadDrafter, HeadOptions
from slipstream.drafters.heads.head_rows import LanedRows, PagedRows
from slipstream.drafters.heads.layer_stack import PagedStack, StackHead
from slipstream.gpu.lanes import LaneRows
from slipstream.models.layers.rope import RopeTable
from slipstream.sequence import Sequence

Options = TypeVar("Options", bound=HeadOptions)


class StackDrafter(HeadDrafter[Options], Generic[Options]):
    """Draft by passes of a stack of layers."""

    # -- implemented by subclasses
    # --------------------------------------------------------------------------------------

    @abstractmethod
    def _entered(self, growths: list[Growth], segments: list[Segment], rows: PagedRows) -> torch.Tensor:
        """The stack's input for the rows of a pass, [rows, width]; one segment per growth."""

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

    def _feed_roots(self, growths: list[Growth]) -> list[torch.Tensor]:
        return catch_up(self.key, growths, lambda some, pieces: self._pass(some, pieces).split(wanted(pieces)))

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self._pass(growths, [growth.segment() for growth in growths])

    def _pass(self, growths: list[Growth], segments: list[Segment]) -> torch.Tensor:
        rows = PagedRows(segments, self.target.config, self._rope, self.target.device, self.target.dtype)
        return self._stack(self._entered(growths, segments, rows), rows, self._cache.layers(self.key))

    def laned(self, tokens: torch.Tensor, rows: LaneRows, tiles: Tiles) -> torch.Tensor:
        """The stack's output for tokens [rows] of lanes, [rows, width]."""
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
