"""Trees that grow level by level on the device, for all lanes at once: the device version of `tree_growth.py`.

The same rules decide which nodes a level adds, which are fed and which are offered. So the trees are the same up to
rounding, with one exception: the device always feeds a full level, likely or not. (Heads of `medusa` that do not read
guesses differ: on the host their trees are not grown by levels.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from slipstream.attention import LaneTiles, Tiles
from slipstream.drafters.device.device_draft import DeviceDraft, DeviceLoop
from slipstream.drafters.growing.tree_growth import GrowingDrafter
from slipstream.gpu import forest
from slipstream.gpu.device_sampling import match_keys
from slipstream.gpu.lanes import LaneRows, Lanes
from slipstream.models.config import ModelConfig
from slipstream.sequence import Sequence
from slipstream.types import Plan


class TreeDraft(DeviceDraft):
    """Trees of one plan, grown level by level by one drafter."""

    def __init__(self, drafter: GrowingDrafter[Any], plan: Plan, kind: type[TreeLoop], chain: int = 0) -> None:
        """`chain`: nodes of another drafter's chain that may replace others, and so make a tree deeper."""
        self._drafter = drafter
        self._kind = kind
        self.origins = (drafter.name,)
        self.plan = plan
        levels = min(plan.depth, plan.nodes)
        self.branch = plan.branch
        self.widths = [1]
        for _ in range(levels - 1):
            self.widths.append(min(drafter.width(plan), self.widths[-1] * plan.branch))
        self.nodes = min(plan.nodes, sum(self.widths) * plan.branch)
        self.chain = min(chain, self.nodes)
        self.depth = max(levels, self.chain)
        self.scratch = max(self.nodes, 2 * self.depth, sum(self.widths))

    def prepare(self, sequences: Seq[Sequence]) -> bool:
        drafter = self._drafter
        late = [s for s in sequences if self.known(s) + self.depth < len(s.tokens) - 1]
        return drafter.bring_up(late) and all(map(drafter.follows, sequences))

    def known(self, sequence: Sequence) -> int:
        return min(sequence.table.lengths.get(self._drafter.key, 0), len(sequence.tokens) - 1)

    def joined(self, plan: Plan, chain: int) -> TreeDraft:
        """The trees for another plan, with room for a chain."""
        return TreeDraft(self._drafter, plan, self._kind, chain)

    def loop(self, lanes: Lanes) -> TreeLoop:
        return self._kind(self._drafter, self, lanes)


class TreeLoop(DeviceLoop):
    """Grows trees. Subclasses run the model."""

    def __init__(self, drafter: GrowingDrafter[Any], draft: TreeDraft, lanes: Lanes) -> None:
        self.lanes = lanes
        self._key = drafter.key
        self.pool = forest.Pool(lanes.size, draft.widths, draft.branch, lanes.device, draft.chain)
        self._joined = draft.chain > 0
        self._below = 1 + torch.arange(len(draft.widths), device=lanes.device)
        self._first = torch.arange(lanes.size, device=lanes.device) * (lanes.depth + 1)

    # -- implemented by subclasses
    # --------------------------------------------------------------------------------------

    ids: torch.Tensor  # int64 [tokens]: the target's ids of the columns of logits

    @abstractmethod
    def begin(self) -> torch.Tensor:
        """Feed the newest tokens, up to the roots; logits [lanes, tokens] after the roots."""

    @abstractmethod
    def follow(self, level: int, nodes: forest.Followed) -> torch.Tensor:
        """Logits [lanes * width, tokens] after the nodes of a level; the level below the root is 1."""

    # -- growing ------------------------------------------------------------------------------------------------------

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        """All state is in the pages."""

    def draft(self, sampled: bool) -> None:
        self.grow(sampled)
        self.offer()

    def grow(self, sampled: bool) -> None:
        """Fill the pool, level by level."""
        pool = self.pool
        keys = self._keys() if sampled else None
        nodes, logits = pool.begin(), self.begin()
        for level in range(len(pool.widths)):
            noise = None if keys is None else forest.SamplingNoise(self.lanes.temperatures, keys[:, level], self.ids)
            scores, indices = forest.likeliest_tokens(logits, pool.branch, noise)
            followed = pool.grow(level, nodes, scores, indices, self.ids)
            if followed is not None:
                nodes = followed
                logits = self.follow(level + 1, nodes)

    def offer(self) -> None:
        """Write the likeliest nodes of the pool into the lanes."""
        lanes, best = self.lanes, self.pool.best(self.lanes.nodes)
        lanes.tokens[:, 1:], lanes.parents[:, 1:], lanes.scores[:, 1:] = best.tokens, best.parents, best.scores
        if self._joined:
            lanes.origins[:, 1:] = best.joined

    def _keys(self) -> torch.Tensor:
        """Keys of the target's noise at the positions of each level's children, int64 [2, levels, lanes]."""
        lanes, levels = self.lanes, len(self._below)
        positions = lanes.slots + self._below[:, None]
        return match_keys(lanes.stems.repeat(1, levels), positions.flatten()).view(2, levels, lanes.size)

    @property
    def first_fresh(self) -> torch.Tensor:
        """Slots of the first of the newest tokens, [lanes]."""
        return self.lanes.slots - self.lanes.accepted

    def last_fresh(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows [lanes * (depth + 1), ...] of the newest tokens, those of the roots, [lanes, ...]."""
        return rows[self._first + self.lanes.accepted]

    def settle(self, sequence: Sequence, lane: int, root_slot: int) -> None:
        # Rows after the last root were guesses; those up to it are accepted tokens.
        sequence.table.lengths[self._key] = min(root_slot + 1, sequence.cached)


class Passes:
    """The rows of each pass of a loop over a model with K/V: the newest tokens, then level by level.

    The slots of all levels follow from the roots, so they are laid out before the first level.
    """

    def __init__(self, lanes: Lanes, widths: Seq[int], config: ModelConfig, fresh: int) -> None:
        """`fresh`: rows of the first pass, a chain; `config`: of the model."""
        self._lanes = lanes
        self._chain = LaneTiles(lanes.tables, fresh, config.group)
        self._fresh = torch.arange(fresh, device=lanes.device)
        self._tiles = []
        lines, offsets, depths = [], [], []
        earlier = 1
        for level, width in enumerate(widths[1:], 1):
            self._tiles.append(LaneTiles(lanes.tables, width, config.group, earlier=earlier, open_rows=True))
            lines.append(torch.arange(lanes.size).repeat_interleave(width))
            offsets.append(torch.arange(earlier, earlier + width).repeat(lanes.size))
            depths.append(torch.full((lanes.size * width,), level))
            earlier += width
        self._sizes = [len(level) for level in lines]
        self._layout = tuple(torch.cat(part).to(lanes.device) for part in (lines, offsets, depths)) if lines else None
        self._rows: Seq[LaneRows] = ()

    def fresh(self, first: torch.Tensor) -> tuple[LaneRows, Tiles]:
        """The rows from slots `first` [lanes] on; also lays out the levels after the roots."""
        if self._layout is not None:
            lines, offsets, depths = self._layout
            self._rows = self._lanes.rows_after_roots(lines, offsets, depths).split(self._sizes)
        return self._lanes.rows(first, self._fresh), self._chain.after(first)

    def level(self, level: int, nodes: forest.Followed) -> tuple[LaneRows, Tiles]:
        """The rows of the nodes that a level feeds."""
        rows = self._rows[level - 1]
        tiles = self._tiles[level - 1]
        return rows, tiles.after(self._lanes.slots, nodes.bits.flatten(0, 1), rows.positions)
