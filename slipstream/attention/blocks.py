"""Attention that reduces over blocks of absolute position, so that a row's result does not depend on its company.

Equality of speculative and plain text is exact only if a token's logits have the same bits whether it came alone, as one
of 64 tree nodes or inside a prompt. Floating-point sums depend on their order, so the order is fixed here:

* keys are grouped into blocks of PAGE_SIZE absolute positions; a block's weighted values are one matrix product, and the
  blocks' results are added one after the other, in order of position;
* inside a block the product runs over the keys in slot order, which along any path through a tree is the order of
  position. Nodes that are not on the path are columns with weight exactly 0, and adding zeros changes nothing;
* scores are computed as K x q (keys are the rows of the product) and the denominator by a product with ones: the forms
  that were found to give the same bits for any number of queries (docs/exactness.md says what was tried);
* exp runs over a number of elements that vector units and threads divide evenly: a scalar remainder rounds differently.

Committed full blocks are read in place, in runs of contiguous pages; the open tail (the last, partial block and the
tree) is read in place too when it lies in one page, and copied together when not: at most a page and a tree, never the
context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.attention.segment import Segment
from slipstream.cache import PAGE_SIZE

_LANES = 32  # elements that one unrolled vector iteration of an elementwise kernel takes
_GRAIN = 32_768  # elements above which an elementwise kernel is split among threads
_MIN_COLUMNS = 4  # query columns of a product; fewer would take a matrix-vector kernel, which rounds differently


@dataclass(frozen=True)
class _Block:
    """Tail columns [start, stop) that hold one block of positions; `inside` masks foreign columns among them."""

    start: int
    stop: int
    inside: torch.Tensor | None


@dataclass(frozen=True)
class _View:
    """What one segment reads in layers of one window size."""

    runs: list[tuple[int, int, torch.Tensor | None]]  # (first page, pages, additive mask [pages, PAGE, rows, 1])
    mask: torch.Tensor  # additive, [tail columns, rows, 1]


class _SegmentPlan:
    """Everything about a segment that does not depend on the layer."""

    def __init__(self, segment: Segment, group: int, kv_heads: int, device: str) -> None:
        self.segment = segment
        self.device = device
        self.group = group
        self.kv_heads = kv_heads
        self.rows = segment.rows
        self.padded_rows = max(segment.rows, -(-_MIN_COLUMNS // group))
        self.full = segment.committed // PAGE_SIZE
        stop = segment.first_slot + segment.rows
        width = stop - self.full * PAGE_SIZE
        self.width = width
        self.columns = _even_columns(width, kv_heads * self.padded_rows * group)
        self.pages = segment.table.pages[self.full : -(-stop // PAGE_SIZE)]
        self.in_place = len(self.pages) == 1 and self.columns <= PAGE_SIZE
        inner = segment.committed - self.full * PAGE_SIZE
        self._column_positions = np.concatenate(
            [np.arange(self.full * PAGE_SIZE, segment.committed), segment.open_positions]
        )
        self._seen = np.ones((segment.rows, width), dtype=np.bool_)
        self._seen[:, inner:] = segment.visible
        self.blocks = self._split()
        self._views: dict[int | None, _View] = {}

    def _split(self) -> list[_Block]:
        block_of = self._column_positions // PAGE_SIZE
        first, last = int(block_of[0]), int(block_of.max())
        if first == last:
            return [_Block(0, self.columns, None)]
        blocks = []
        for number in range(first, last + 1):
            inside = block_of == number
            where = np.flatnonzero(inside)
            start, stop = int(where[0]), int(where[-1]) + 1
            pure = bool(inside[start:stop].all())
            mask = None if pure else torch.from_numpy(inside[start:stop, None]).to(self.device, torch.float32)
            blocks.append(_Block(start, stop, mask))
        return blocks

    def view(self, window: int | None) -> _View:
        """Masks and page runs for layers that look back `window` positions; made once a pass."""
        if window not in self._views:
            self._views[window] = self._make_view(window)
        return self._views[window]

    def _make_view(self, window: int | None) -> _View:
        positions = self.segment.positions
        seen = self._seen
        first_page = 0
        if window is not None:
            seen = seen & (self._column_positions[None, :] > positions[:, None] - window)
            first_page = min(self.full, max(0, int(positions.min()) - window + 1) // PAGE_SIZE)
        mask = np.full((self.columns, self.padded_rows, 1), -np.inf, dtype=np.float32)
        mask[: self.width, : self.rows, 0] = np.where(seen.T, 0.0, -np.inf)
        mask[:, self.rows :] = 0.0  # rows that only fill up the product; whatever they see must be finite
        runs = []
        pages = self.segment.table.pages
        for start, count in _runs(pages[first_page : self.full]):
            first = first_page + start
            runs.append((pages[first], count, self._run_mask(first, count, window)))
        return _View(runs, torch.from_numpy(mask).to(self.device))

    def _run_mask(self, first: int, count: int, window: int | None) -> torch.Tensor | None:
        if window is None:
            return None
        keys = np.arange(first * PAGE_SIZE, (first + count) * PAGE_SIZE)
        hidden = keys[:, None] <= self.segment.positions[None, :] - window
        if not hidden.any():
            return None
        mask = np.zeros((count, PAGE_SIZE, self.padded_rows, 1), dtype=np.float32)
        mask[:, :, : self.rows, 0] = np.where(hidden, -np.inf, 0.0).reshape(count, PAGE_SIZE, self.rows)
        return torch.from_numpy(mask).to(self.device)

    def tail(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys or values of the tail, [kv heads, columns, head size]; `rows` is [pages, kv heads, PAGE, head size]."""
        if self.in_place:
            return rows[self.pages[0], :, : self.columns].float()
        missing = self.columns - len(self.pages) * PAGE_SIZE
        parts = [rows[page] for page in self.pages]
        if missing > 0:
            parts.append(rows.new_zeros(rows.shape[1], missing, rows.shape[3]))
        return torch.cat(parts, dim=1)[:, : self.columns].float()


class BlockAttention:
    """Attention of one pass: built once from its segments, then called for every layer."""

    def __init__(self, segments: Sequence[Segment], heads: int, kv_heads: int, scale: float, device: str) -> None:
        self._group = heads // kv_heads
        self._scale = scale
        self._plans = [_SegmentPlan(s, self._group, kv_heads, device) for s in segments]

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
        """q [rows, heads, size] over one layer's pages [pages, kv heads, PAGE, size] -> [rows, heads * size]."""
        q = q.float() * self._scale
        if len(self._plans) == 1:
            return self._one(self._plans[0], q, keys, values, window)
        results, start = [], 0
        for plan in self._plans:
            results.append(self._one(plan, q[start : start + plan.rows], keys, values, window))
            start += plan.rows
        return torch.cat(results)

    def _one(
        self, plan: _SegmentPlan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        rows, heads, size = q.shape
        kv_heads, group = heads // self._group, self._group
        if plan.padded_rows != rows:
            q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, plan.padded_rows - rows))
        # [kv heads, rows * group, size]: all query heads of a KV head go into one product
        queries = q.view(-1, kv_heads, group, size).transpose(0, 1).reshape(kv_heads, -1, size)
        view = plan.view(window)

        tail_scores = torch.bmm(plan.tail(keys), queries.transpose(1, 2))
        tail_scores.view(kv_heads, plan.columns, plan.padded_rows, group).add_(view.mask)
        peak = tail_scores.amax(dim=1, keepdim=True)
        run_scores = []
        for first, count, mask in view.runs:
            block = keys[first : first + count].reshape(count * kv_heads, PAGE_SIZE, size).float()
            scores = torch.bmm(block, queries.repeat(count, 1, 1).transpose(1, 2)).view(count, kv_heads, PAGE_SIZE, -1)
            if mask is not None:
                scores.view(count, kv_heads, PAGE_SIZE, plan.padded_rows, group).add_(mask[:, None])
            peak = torch.maximum(peak, scores.amax(dim=2, keepdim=True).amax(dim=0))
            run_scores.append(scores)

        total: torch.Tensor | None = None
        weight: torch.Tensor | None = None
        for (first, count, _), scores in zip(view.runs, run_scores, strict=True):
            p = scores.sub_(peak).exp_().view(count * kv_heads, PAGE_SIZE, -1).transpose(1, 2)
            block = values[first : first + count].reshape(count * kv_heads, PAGE_SIZE, size).float()
            sums = torch.bmm(p, block).view(count, kv_heads, -1, size)
            weights = torch.bmm(p, _ones(p)).view(count, kv_heads, -1, _MIN_COLUMNS)
            for number in range(count):
                total = sums[number] if total is None else total + sums[number]
                weight = weights[number] if weight is None else weight + weights[number]
        p = tail_scores.sub_(peak).exp_()
        tail_values = plan.tail(values)
        for part in plan.blocks:
            inside = p[:, part.start : part.stop]
            if part.inside is not None:
                inside = inside * part.inside
            inside = inside.transpose(1, 2)
            sums = torch.bmm(inside, tail_values[:, part.start : part.stop])
            weights = torch.bmm(inside, _ones(inside))
            total = sums if total is None else total + sums
            weight = weights if weight is None else weight + weights
        assert total is not None and weight is not None
        result = (total / weight[..., :1]).view(kv_heads, -1, group, size)[:, :rows]
        return result.transpose(0, 1).reshape(rows, heads * size)


_ONES: dict[tuple[int, int, str], torch.Tensor] = {}


def _ones(p: torch.Tensor) -> torch.Tensor:
    """Ones to multiply p [batch, rows, columns] with; columns that serve as a row sum."""
    key = (p.shape[0], p.shape[2], str(p.device))
    if key not in _ONES:
        _ONES[key] = torch.ones(p.shape[0], p.shape[2], _MIN_COLUMNS, device=p.device)
    return _ONES[key]


def _even_columns(width: int, per_column: int) -> int:
    """The least number of columns >= width whose elements fill whole vectors, on every thread."""
    columns = -(-width // _LANES) * _LANES
    if columns * per_column <= _GRAIN:
        return columns
    share = _LANES * torch.get_num_threads()
    step = math.lcm(_LANES, share // math.gcd(share, per_column))
    return -(-width // step) * step


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(index of the first, count) of each run of consecutive page numbers."""
    runs: list[tuple[int, int]] = []
    for index, page in enumerate(pages):
        if runs and pages[index - 1] + 1 == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
