"""Heads that draft level by level from the target's hidden states: EAGLE and multi-token prediction.

The row of token x_j reads the hidden states of x_(j-1); both are known for every token up to the root. After the root
there are no hidden states of the target yet, so a node reads the head's own output at its parent. After the target's
pass the rows are recomputed from the true hidden states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from slipstream.attention import Segment, Tiles
from slipstream.cache import PagedCache
from slipstream.drafters.base import Outcome
from slipstream.drafters.device.device_draft import DeviceKeeper
from slipstream.drafters.device.tree_loop import Passes, TreeDraft, TreeLoop
from slipstream.drafters.growing.catch_up import catch_up, wanted
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.features import FeatureKeeper, FeatureStore
from slipstream.drafters.heads.head_drafter import HeadDrafter, HeadOptions
from slipstream.drafters.heads.head_layer import PagedHeadLayer
from slipstream.drafters.heads.head_program import HeadProgram, Left, NodeRows
from slipstream.drafters.heads.head_rows import HeadRows, LanedRows, PagedRows
from slipstream.gpu.forest import Followed
from slipstream.gpu.lanes import LaneRows, Lanes
from slipstream.models.layers.rope import RopeTable
from slipstream.models.rows import tokens_of
from slipstream.sequence import Sequence
from slipstream.types import Plan

Options = TypeVar("Options", bound=HeadOptions)


class SequentialDrafter(HeadDrafter[Options], Generic[Options]):
    """Draft by passes of a one-layer head."""

    layers = 1  # layers whose K/V are in the store
    program: HeadProgram | None = None  # the whole head for our own CPU kernels, if a subclass has one
    _layer: PagedHeadLayer

    # -- implemented by subclasses
    # --------------------------------------------------------------------------------------

    @abstractmethod
    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [rows, taps * width] as the head reads them, [rows, width]."""

    @abstractmethod
    def _entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and hidden states [rows, width] -> the input of the layer's GEMMs, and its residual."""

    @abstractmethod
    def judged(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output [rows, width] -> logits [rows, draft tokens]."""

    # -- passes -------------------------------------------------------------------------------------------------------

    def attach(self, cache: PagedCache) -> None:
        config, dtype = self.shape, self.target.dtype
        self._cache = cache
        self._rope = RopeTable(config, self.target.device)
        self._features = FeatureStore(cache, f"{self.key}.features", self.taps, config.hidden_size, dtype)
        self.stores_needed = (self._features.name,)
        cache.add_store(self.key, self.layers, 2, config.kv_heads, config.head_dim, dtype)

    def _feed_roots(self, growths: list[Growth]) -> list[torch.Tensor]:
        if self.program is not None:
            known = partial(self._known_by_program, self.program)
            return _kept(growths, catch_up(self.key, growths, known))
        rows = []
        for growth, (output, logits) in zip(growths, catch_up(self.key, growths, self._known), strict=True):
            self._begin(growth, output[-1:])
            rows.append(logits)
        return rows

    def _begin(self, growth: Growth, output: torch.Tensor) -> None:
        """Keep what the pass gave at the root, a row [1, ...]."""
        growth.hidden = [output]

    def _read_features(self, segments: Seq[Segment]) -> torch.Tensor:
        """The target's hidden states before the tokens of these rows."""
        read = [self._features.read(s.table, s.committed - 1, s.committed - 1 + s.rows) for s in segments]
        return read[0] if len(read) == 1 else torch.cat(read)

    def _known(self, _: list[Growth], segments: list[Segment]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A pass over known tokens: for each segment the output of all rows, and the logits that it requests."""
        output, logits = self._pass(segments, self.hidden(self._read_features(segments)))
        return zip(output.split([s.rows for s in segments]), logits.split(wanted(segments)), strict=True)

    def _known_by_program(self, program: HeadProgram, growths: list[Growth], segments: list[Segment]) -> Iterator[Left]:
        """`_known` by our own kernels; of a segment's rows only the root has an output, if it is among them."""
        counts = wanted(segments)
        ends = accumulate(segment.rows for segment in segments)
        last = [end - 1 for end, count in zip(ends, counts, strict=True) if count]
        embedded, features = self.target.embed(tokens_of(segments, "cpu")), self._read_features(segments)
        rows, store = program.rows(segments, self._rope), self._cache.layers(self.key)[0]
        return program.known(rows, embedded, features, store, last, _children(growths)).split(counts)

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        if self.program is not None:
            return self._run_program(self.program, growths)
        segments = [growth.segment() for growth in growths]
        before = []
        for growth in growths:
            parents = torch.tensor(growth.tree.parents[growth.fed :], device=self.target.device)
            before.append(torch.cat(growth.hidden)[parents])
        output, logits = self._pass(segments, torch.cat(before))
        for growth, hidden in zip(growths, output.split([s.rows for s in segments]), strict=True):
            growth.hidden.append(hidden)
        return logits

    def _run_program(self, program: HeadProgram, growths: list[Growth]) -> torch.Tensor:
        nodes = [NodeRows.of(growth) for growth in growths]
        before = []
        for growth in growths:
            above = growth.outputs  # outputs of the level above, which has all parents
            assert above is not None
            first = growth.fed - len(above)
            before.append(above[[parent - first for parent in growth.tree.parents[growth.fed :]]])
        tokens = np.array([token for growth in growths for token in growth.tree.tokens[growth.fed :]])
        embedded, hidden = self.target.embed(torch.from_numpy(tokens)), np.concatenate(before)
        rows, store = program.rows(nodes, self._rope), self._cache.layers(self.key)[0]
        left = program.level(rows, embedded, hidden, store, _children(growths))
        _kept(growths, left.split([group.rows for group in nodes]))
        return left.logits

    def _pass(self, segments: list[Segment], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output for all rows, and the logits of those that request them."""
        rows = PagedRows(segments, self.shape, self._rope, self.target.device, self.target.dtype)
        output = self.layered(self.target.embed(rows.tokens), hidden, rows)
        return output, self.judged(rows.wanted(output))

    def layered(self, embedded: torch.Tensor, hidden: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        """The layer's output for rows of embeddings and hidden states, [rows, width] each."""
        inputs, residual = self._entered(embedded, hidden)
        return self._layer(inputs, residual, rows, self._cache.layers(self.key)[0])

    def laned(self, rows: LaneRows, tiles: Tiles) -> LanedRows:
        """Rows of lanes as the layer reads them."""
        return LanedRows(rows, tiles, self.shape, self._rope, self.target.device)

    @property
    def features(self) -> FeatureStore:
        """The store of hidden states."""
        return self._features

    def device_keepers(self, lanes: Lanes, drafting: Seq[Plan] = ()) -> list[DeviceKeeper]:
        return [FeatureKeeper(self._features, lanes)]

    def follows(self, sequence: Sequence) -> bool:
        # After guesses of a drafter above, and during prefill, hidden states before the root are missing.
        return self._features.follows(sequence)

    def loop_type(self) -> type[TreeLoop] | None:
        return SequentialLoop if self.layers == 1 else None

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            table = outcome.sequence.table
            self._features.append(outcome)
            growth: Growth | None = outcome.sequence.drafting.pop(self.key, None)
            if growth is not None:  # rows after the root were guesses
                self._cache.truncate(table, self.key, growth.root_slot + 1)

    def depart(self, outcome: Outcome) -> None:
        self._features.append(outcome)

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._cache.truncate(sequence.table, self.key, length)


def _kept(growths: Seq[Growth], left: Iterable[Left]) -> list[torch.Tensor]:
    """Keep the results of a pass with the trees; returns the logits."""
    rows = []
    for growth, part in zip(growths, left, strict=True):
        growth.outputs, growth.likeliest = part.output, part.likeliest
        rows.append(part.logits)
    return rows


def _children(growths: Seq[Growth]) -> int:
    """Likeliest children that the nodes of these trees need; 0 if they depend on more than logits."""
    plain = all(g.sequence.params.greedy and g.sequence.sampler.simple and not g.sampled for g in growths)
    return max(growth.plan.branch for growth in growths) if plain else 0


class FeatureLoop(TreeLoop):
    """A loop whose model reads hidden states of the target, stored under the page tables."""

    def __init__(self, drafter: SequentialDrafter[Any], draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        self.drafter = drafter
        self.ids = drafter.vocab
        self._keeper = FeatureKeeper(drafter.features, lanes)

    def features(self) -> torch.Tensor:
        """The hidden states before each of the newest tokens, [lanes * (depth + 1), taps * width]."""
        return self.lanes.features_before(self.drafter.features.data)

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        self._keeper.observe(path, accepted, taps)

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        super().settle(sequence, lane, root_slot)
        self._keeper.settle(sequence, lane, root_slot)


class SequentialLoop(FeatureLoop):
    """One layer, level by level, on its own outputs."""

    def __init__(self, drafter: SequentialDrafter[Any], draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        config = drafter.shape
        self._passes = Passes(lanes, draft.widths, config, lanes.depth + 1)
        self._output: torch.Tensor  # of the level above, [lanes * width, hidden]

    def begin(self) -> torch.Tensor:
        drafter, lanes = self.drafter, self.lanes
        rows = drafter.laned(*self._passes.fresh(self.first_fresh))
        embedded = drafter.target.embed(lanes.last_tokens.flatten())
        self._output = self.last_fresh(drafter.layered(embedded, drafter.hidden(self.features()), rows))
        return drafter.judged(self._output)

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        drafter = self.drafter
        rows = drafter.laned(*self._passes.level(level, nodes))
        embedded = drafter.target.embed(nodes.tokens.flatten())
        self._output = drafter.layered(embedded, self._output[nodes.parents.flatten()], rows)
        return drafter.judged(self._output)
