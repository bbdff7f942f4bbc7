"""Heads that draft one level after the other from the target's hidden states: EAGLE and multi-token prediction.

The row of token x_j reads the hidden states of x_(j-1); both are known for every token up to the root. Behind the root
there are no hidden states of the target yet, so a node reads the head's own output at its parent instead. After the
target's pass the true ones are there, and the rows are made again from them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

import torch

from slipstream.attention import Segment
from slipstream.cache import PagedCache
from slipstream.drafters.base import Outcome
from slipstream.drafters.features import FeatureStore
from slipstream.drafters.head_layer import PagedHeadLayer
from slipstream.drafters.head_rows import PagedRows
from slipstream.drafters.learned import LearnedDrafter, LearnedOptions
from slipstream.drafters.levels import Growth
from slipstream.models.rope import RopeTable
from slipstream.sequence import Sequence

Options = TypeVar("Options", bound=LearnedOptions)


class SequentialDrafter(LearnedDrafter[Options], Generic[Options]):
    """Draft by passes of a head of one layer."""

    layers = 1  # whose K/V the store holds
    _layer: PagedHeadLayer

    # -- what a method has to say -------------------------------------------------------------------------------------

    @abstractmethod
    def _hidden(self, features: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [rows, taps * width] as the head reads them, [rows, width]."""

    @abstractmethod
    def _entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and hidden states [rows, width] -> what goes into the layer's products, and its residual."""

    @abstractmethod
    def _judged(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output [rows, width] -> logits [rows, draft tokens]."""

    # -- passes -------------------------------------------------------------------------------------------------------

    def attach(self, cache: PagedCache) -> None:
        config, dtype = self.shape, self.target.dtype
        self._cache = cache
        self._rope = RopeTable(config, self.target.device)
        self._features = FeatureStore(cache, f"{self.key}.features", self.taps, config.hidden_size, dtype)
        cache.add_store(self.key, self.layers, 2, config.kv_heads, config.head_dim, dtype)

    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        # Behind guesses of a drafter above, and while a prompt is being fed, hidden states before the root are missing.
        ready = [g for g in growths if g.plan.drafts and self._features.length(g.sequence.table) >= g.root_slot]
        waiting, rows = ready, dict[int, torch.Tensor]()
        while waiting:
            segments = [growth.unseen(growth.sequence.table.lengths[self.key]) for growth in waiting]
            features = [self._features.read(s.table, s.committed - 1, s.committed - 1 + s.rows) for s in segments]
            output, logits = self._pass(segments, self._hidden(torch.cat(features)))
            wanted = iter(logits.split(1))
            for growth, segment, hidden in zip(
                waiting, segments, output.split([s.rows for s in segments]), strict=True
            ):
                segment.table.lengths[self.key] = segment.committed + segment.rows
                if segment.logits_from < segment.rows:
                    rows[id(growth)] = next(wanted)
                    growth.fed, growth.hidden = 1, [hidden[-1:]]
            waiting = [growth for growth in waiting if id(growth) not in rows]
        return [rows.get(id(g)) for g in growths]

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        segments = [growth.segment() for growth in growths]
        before = []
        for growth in growths:
            parents = torch.tensor(growth.tree.parents[growth.fed :], device=self.target.device)
            before.append(torch.cat(growth.hidden)[parents])
        output, logits = self._pass(segments, torch.cat(before))
        for growth, hidden in zip(growths, output.split([s.rows for s in segments]), strict=True):
            growth.hidden.append(hidden)
        return logits

    def _pass(self, segments: list[Segment], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output for all rows, and the logits of those that ask for them."""
        rows = PagedRows(segments, self.shape, self._rope, self.target.device)
        inputs, residual = self._entered(self.target.embed(rows.tokens), hidden)
        output = self._layer(inputs, residual, rows, self._cache.layers(self.key)[0])
        return output, self._judged(rows.wanted(output))

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            table = outcome.sequence.table
            self._features.append(outcome)
            growth: Growth | None = outcome.sequence.drafting.pop(self.key, None)
            if growth is not None:  # rows behind the root were made of guesses
                self._cache.truncate(table, self.key, growth.root_slot + 1)

    def depart(self, outcome: Outcome) -> None:
        self._features.append(outcome)

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._cache.truncate(sequence.table, self.key, length)
