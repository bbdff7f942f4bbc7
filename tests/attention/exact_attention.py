"""Passes over random pages for `test_exact_attention.py`, which runs this file where there are kernels to run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.attention import ExactPagedAttention, LaneTiles, Segment, tree_segment
from slipstream.cache import PAGE_SIZE, LayerStore, PageTable
from slipstream.gpu.forest import geometry
from slipstream.tree import TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_tree(chooser: random.Random, nodes: int) -> TokenTree:
    tree = TokenTree(0)
    while len(tree) <= nodes:
        tree.add(chooser.randrange(max(0, len(tree) - 5), len(tree)), len(tree))
    return tree


@dataclass
class Pass:
    """Sequences in shuffled pages, their own K/V in every slot, and NaN in rows that must not be read."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    seed: int = 0
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self._pages = list(range(64))
        self.chooser.shuffle(self._pages)
        both = torch.full((2, 64, self.kv_heads, PAGE_SIZE, self.size), float("nan"))
        self.layer = LayerStore(both.to(DEVICE, self.dtype))

    def table(self, slots: int) -> PageTable:
        """Pages for so many slots."""
        return PageTable([self._pages.pop() for _ in range(-(-slots // PAGE_SIZE))])

    def rows(self, table: PageTable, slots: range | list[int]) -> torch.Tensor:
        """K and V at slots, [2, slots, kv heads, size]."""
        at = torch.tensor(list(slots), dtype=torch.long)
        return self.layer.both[:, torch.tensor(table.pages)[at // PAGE_SIZE], :, at % PAGE_SIZE].transpose(0, 1)

    def write(self, table: PageTable, start: int, rows: torch.Tensor) -> None:
        """Append rows [2, slots, kv heads, size]."""
        at = torch.arange(start, start + rows.shape[1])
        self.layer.both[:, torch.tensor(table.pages)[at // PAGE_SIZE], :, at % PAGE_SIZE] = rows.transpose(0, 1)

    def add(self, committed: int, pending: int, tree: TokenTree | None, first_node: int = 0) -> Segment:
        """One more sequence."""
        table = self.table(committed + pending + (0 if tree is None else len(tree)))
        segment = tree_segment(table, committed, [1] * pending, tree, first_node)
        shape = (2, segment.first_slot + segment.rows, self.kv_heads, self.size)
        self.write(table, 0, torch.randn(shape).to(DEVICE, self.dtype))
        self.segments.append(segment)
        return segment

    def queries(self, rows: int) -> torch.Tensor:
        """Random ones, with room for keys and values after them."""
        width = (self.heads + 2 * self.kv_heads) * self.size
        return (torch.randn(rows, width) * 2 * self.size**-0.5).to(DEVICE, self.dtype)

    def attend(self, segments: list[Segment], q: torch.Tensor) -> torch.Tensor:
        """[rows, heads * size], by the kernels."""
        shape = self.heads, self.kv_heads, self.size
        return ExactPagedAttention(segments, *shape, DEVICE, self.softcap)(q, self.layer, self.window)

    def attend_lanes(self, trees: list[TokenTree], q: torch.Tensor) -> torch.Tensor:
        """The same for trees of one size after the committed rows of the segments, laid out as in a burst."""
        longest = max(len(s.table.pages) for s in self.segments)
        tables = torch.tensor([s.table.pages + [0] * (longest - len(s.table.pages)) for s in self.segments])
        parents = torch.tensor([[max(0, parent) for parent in tree.parents] for tree in trees], device=DEVICE)
        depths, bits = geometry(parents, max(tree.depth for tree in trees))
        committed = torch.tensor([s.committed for s in self.segments], device=DEVICE)
        group = self.heads // self.kv_heads
        lanes = LaneTiles(tables.to(DEVICE, torch.int32), len(trees[0]), group, open_rows=True)
        tiles = lanes.after(committed, bits.flatten(0, 1), (committed[:, None] + depths).flatten())
        shape = self.heads, self.kv_heads, self.size
        return ExactPagedAttention((), *shape, DEVICE, self.softcap, tiles)(q, self.layer, self.window)

    def alone(self, segment: Segment, row: int, q: torch.Tensor) -> torch.Tensor:
        """One row of a segment as plain decoding computes it: its path committed in other pages, q [1, width]."""
        open_slots = segment.committed + np.flatnonzero(segment.visible[row])
        slots = [*range(segment.committed), *open_slots.tolist()]
        table = self.table(len(slots))
        self.write(table, 0, self.rows(segment.table, slots))
        found = self.attend([tree_segment(table, len(slots) - 1, [1], TokenTree(1))], q)
        self._pages += table.pages
        return found

    def truth(self, q: torch.Tensor) -> torch.Tensor:
        """All segments in float64, from what they say about their rows."""
        answers, start = [], 0
        for segment in self.segments:
            stop = segment.first_slot + segment.rows
            keys, values = self.rows(segment.table, range(stop)).double().cpu()
            seen = np.ones((segment.rows, stop), dtype=np.bool_)
            seen[:, segment.committed :] = segment.visible
            places = np.concatenate([np.arange(segment.committed), segment.open_positions])
            if self.window is not None:
                seen &= places[None, :] > segment.positions[:, None] - self.window
            mine = q[start : start + segment.rows, : self.heads * self.size].double().cpu()
            scores = torch.einsum("rhgd,chd->rhgc", mine.view(len(mine), self.kv_heads, -1, self.size), keys)
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores)
            scores.masked_fill_(~torch.from_numpy(seen)[:, None, None], float("-inf"))
            answers.append(torch.einsum("rhgc,chd->rhgd", scores.softmax(-1), values).flatten(1))
            start += segment.rows
        return torch.cat(answers)
