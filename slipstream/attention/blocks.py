"""Batch-invariant attention: sums run over blocks of absolute positions.

Equality of speculative and plain text is exact only if a token's logits have the same bits whether it came alone, as
one of 64 tree nodes or inside a prompt. Floating-point sums depend on their order, so the order is fixed here:

* keys are grouped into blocks of PAGE_SIZE absolute positions; a block's weighted values are one GEMM, and
  the blocks' results are added one after the other, in order of position;
* inside a block the GEMM sums over the keys in slot order, which along any path through a tree is the order of
  position. Nodes that are not on the path are columns with weight exactly 0, and adding zeros changes nothing;
* a GEMM never has fewer query rows than `_least_rows`: below that, kernels round differently. The denominator is a
  GEMM with ones, because a library's sum takes its order from the shape (docs/exactness.md says what was tried);
* exp runs over a number of elements that vector units and threads divide evenly: a scalar remainder rounds differently.

Scores may be soft-capped. The cap comes before the mask, so the fused GEMM that also adds the mask is not used then.

Committed full blocks are read in place, in runs of contiguous pages; the open tail (the last, partial block and the
tree) is read in place too if it is in one page, and otherwise gathered: at most a page and a tree, never the context.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from slipstream.attention.even import LANES, evenly_
from slipstream.attention.segment import Segment
from slipstream.cache import PAGE_SIZE, LayerStore

_SUMS = 16  # columns of a GEMM that only sums: below a vector's width, kernels use another order


@dataclass(frozen=True)
class _Block:
    """Tail columns [start, stop) of one block of positions; `inside` masks columns of other blocks among them."""

    start: int
    stop: int
    inside: torch.Tensor | None


@dataclass(frozen=True)
class _View:
    """What one segment reads in layers with one window size."""

    runs: list[tuple[int, int, torch.Tensor | None]]  # (first page, pages, additive mask [pages, 1, rows, 1, PAGE])
    mask: torch.Tensor  # additive, [1, rows * group, tail columns]
    line: tuple[int, int] | None  # first page and page count, if one row sees them all; `mask` is for the last page


class _SegmentPlan:
    """Everything about a segment that is the same for all layers."""

    def __init__(self, segment: Segment, group: int, size: int, device: str) -> None:
        self.segment = segment
        self.device = device
        self.group = group
        self.rows = segment.rows
        self.padded_rows = max(segment.rows, -(-_least_rows(size) // group))
        self.full = segment.committed // PAGE_SIZE
        stop = segment.first_slot + segment.rows
        width = stop - self.full * PAGE_SIZE
        self.width = width
        self.columns = -(-width // LANES) * LANES
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
            inside = np.zeros(self.columns, dtype=np.bool_)
            inside[: self.width] = block_of == number
            where = np.flatnonzero(inside)
            # Never fewer than LANES columns: very small GEMMs use another kernel.
            stop = min(self.columns, max(int(where[-1]) + 1, int(where[0]) + LANES))
            start = max(0, min(int(where[0]), stop - LANES))
            pure = bool(inside[start:stop].all())
            mask = None if pure else torch.from_numpy(inside[start:stop]).to(self.device, torch.float32)
            blocks.append(_Block(start, stop, mask))
        return blocks

    def view(self, window: int | None) -> _View:
        """Masks and page runs for layers with this window; computed once per pass."""
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
        mask = np.full((self.padded_rows, self.columns), -np.inf, dtype=np.float32)
        mask[: self.rows, : self.width][seen] = 0.0
        mask[self.rows :] = 0.0  # padding rows; what they see must be finite
        mask = mask.repeat(self.group, axis=0)[None]
        runs = []
        pages = self.segment.table.pages
        for start, count in _runs(pages[first_page : self.full]):
            first = first_page + start
            runs.append((pages[first], count, self._run_mask(first, count, window)))
        line = self._line(runs)
        if line is not None:
            mask = np.pad(mask, ((0, 0), (0, 0), (0, PAGE_SIZE - self.columns)), constant_values=-np.inf)
        return _View(runs, torch.from_numpy(mask).to(self.device), line)

    def _line(self, runs: list[tuple[int, int, torch.Tensor | None]]) -> tuple[int, int] | None:
        """First page and page count, if a single row sees all of several contiguous pages, ending with its own."""
        if self.padded_rows > 1 or not self.in_place or len(self.blocks) > 1 or len(runs) != 1:
            return None
        first, count, mask = runs[0]
        return (first, count + 1) if mask is None and first + count == self.pages[0] else None

    def _run_mask(self, first: int, count: int, window: int | None) -> torch.Tensor | None:
        if window is None:
            return None
        keys = np.arange(first * PAGE_SIZE, (first + count) * PAGE_SIZE)
        hidden = keys[None, :] <= self.segment.positions[:, None] - window
        if not hidden.any():
            return None
        mask = np.zeros((count, 1, self.padded_rows, 1, PAGE_SIZE), dtype=np.float32)
        by_page = np.where(hidden, -np.inf, 0.0).reshape(self.rows, count, PAGE_SIZE)
        mask[:, 0, : self.rows, 0] = by_page.transpose(1, 0, 2)
        return torch.from_numpy(mask).to(self.device)

    def tail(self, layer: LayerStore) -> tuple[torch.Tensor, torch.Tensor]:
        """The tail's keys, transposed [kv heads, size, columns], and values [kv heads, columns, size]."""
        if self.in_place:
            keys, values = layer.head(self.pages[0], self.columns)
        else:
            keys, values = self._gather(layer.keys).transpose(1, 2), self._gather(layer.values)
        return _float32(keys), _float32(values)

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.columns - len(self.pages) * PAGE_SIZE
        parts = [rows[page] for page in self.pages]
        if missing > 0:
            parts.append(rows.new_zeros(rows.shape[1], missing, rows.shape[3]))
        return torch.cat(parts, dim=1)[:, : self.columns]


class BlockAttention:
    """The attention of one pass: built once from its segments, then called for every layer."""

    def __init__(
        self,
        segments: Sequence[Segment],
        heads: int,
        kv_heads: int,
        size: int,
        device: str,
        softcap: float | None = None,
    ) -> None:
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._size = size
        self._softcap = softcap
        self._plans = [_SegmentPlan(s, self._group, size, device) for s in segments]

    def __call__(self, q: torch.Tensor, layer: LayerStore, window: int | None) -> torch.Tensor:
        """Queries, already scaled (and divided by a soft cap, if there is one), over one layer's pages.

        q is [rows, heads * size or more]: keys and values may follow the queries, as in a fused qkv.
        Returns [rows, heads * size] in float32.
        """
        q = _float32(q)
        if len(self._plans) == 1:
            return self._one(self._plans[0], q, layer, window)
        results, start = [], 0
        for plan in self._plans:
            results.append(self._one(plan, q[start : start + plan.rows], layer, window))
            start += plan.rows
        return torch.cat(results)

    def _one(self, plan: _SegmentPlan, q: torch.Tensor, layer: LayerStore, window: int | None) -> torch.Tensor:
        kv_heads, group, size = self._kv_heads, self._group, self._size
        if plan.padded_rows != plan.rows:
            q = functional.pad(q, (0, 0, 0, plan.padded_rows - plan.rows))
        # All query heads of a KV head are rows of one GEMM: [kv heads, rows * group, size]
        single = plan.padded_rows == 1
        if single:
            q = q.as_strided((kv_heads, group, size), (group * size, size, 1))
        else:
            by_row = q.as_strided((plan.padded_rows, kv_heads, group, size), (q.shape[1], group * size, size, 1))
            q = by_row.transpose(0, 1).reshape(kv_heads, -1, size)
        view = plan.view(window)
        if view.line is not None:
            result = self._over_line(q, layer, *view.line, view.mask)
        else:
            result = self._over_parts(plan, view, q, layer)
        if single:
            return result.view(1, -1)
        return result.view(kv_heads, -1, group, size)[:, : plan.rows].transpose(0, 1).reshape(plan.rows, -1)

    def _over_line(
        self, q: torch.Tensor, layer: LayerStore, first: int, count: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention over `count` contiguous pages, of which the last one is masked: the case of a single sequence.

        The same sums as in `_over_parts`, with all blocks in one operation where that does not change them.
        """
        kv_heads, size = self._kv_heads, self._size
        keys, values = layer.line(first, count)
        queries = q.expand(count, *q.shape).flatten(0, 1)
        scores = self._capped(torch.bmm(queries, _float32(keys)))
        scores.narrow(0, (count - 1) * kv_heads, kv_heads).add_(mask)
        by_block = scores.view(count, kv_heads, -1, PAGE_SIZE)
        weights = evenly_(torch.exp_, by_block.sub_(by_block.amax(dim=(0, 3), keepdim=True))).view(scores.shape)
        sums = scores.new_empty(2, count, kv_heads, q.shape[1], size)  # weighted values, and weights
        flat = sums.view(2, count * kv_heads, q.shape[1], size)
        torch.bmm(weights, _float32(values), out=flat[0])
        torch.bmm(weights, _ones(count * kv_heads, PAGE_SIZE, size, weights.device), out=flat[1])
        parts = sums.unbind(1)
        total = parts[0]
        for more in parts[1:]:
            total = total + more
        return total[0].div_(total[1])

    def _over_parts(self, plan: _SegmentPlan, view: _View, q: torch.Tensor, layer: LayerStore) -> torch.Tensor:
        """Attention over any runs of pages and a tail: [kv heads, rows * group, size]."""
        kv_heads, group, size = self._kv_heads, self._group, self._size
        tail_keys, tail_values = plan.tail(layer)
        if self._softcap is None:
            tail = torch.baddbmm(view.mask, q, tail_keys)
        else:
            tail = self._capped(torch.bmm(q, tail_keys)).add_(view.mask)
        peak = tail.amax(dim=-1, keepdim=True)
        runs = []
        for first, count, mask in view.runs:
            queries = q.expand(count, *q.shape).flatten(0, 1)
            scores = self._capped(torch.bmm(queries, _blocks(layer.keys, first, count).transpose(1, 2)))
            if mask is not None:
                scores.view(count, kv_heads, plan.padded_rows, group, PAGE_SIZE).add_(mask)
            scores = scores.view(count, kv_heads, -1, PAGE_SIZE)
            peak = torch.maximum(peak, scores.amax(dim=-1, keepdim=True).amax(dim=0))
            runs.append(scores)

        parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (weighted values, weights) of each block, in order
        wide = size if plan.padded_rows == 1 else _SUMS  # a single row's sums are as wide as the values
        for (first, count, _), scores in zip(view.runs, runs, strict=True):
            weights = evenly_(torch.exp_, scores.sub_(peak)).view(count * kv_heads, -1, PAGE_SIZE)
            sums = torch.bmm(weights, _blocks(layer.values, first, count)).view(count, kv_heads, -1, size)
            totals = _row_sums(weights, wide).view(count, kv_heads, -1, wide)
            parts.extend(zip(sums.unbind(), totals.unbind(), strict=True))
        weights = evenly_(torch.exp_, tail.sub_(peak))
        if len(plan.blocks) == 1:
            parts.append((torch.bmm(weights, tail_values), _row_sums(weights, wide)))
        else:
            for block in plan.blocks:
                inside = weights[:, :, block.start : block.stop]
                if block.inside is not None:
                    inside = inside * block.inside
                parts.append((torch.bmm(inside, tail_values[:, block.start : block.stop]), _row_sums(inside, wide)))
        total, weight = parts[0]
        for more, heavier in parts[1:]:
            total, weight = total + more, weight + heavier
        return total.div_(weight if wide == size else weight[:, :, :1])

    def _capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Soft-cap scores in place; the queries were divided by the cap."""
        return scores if self._softcap is None else evenly_(torch.tanh_, scores).mul_(self._softcap)


def _row_sums(weights: torch.Tensor, wide: int) -> torch.Tensor:
    """Sums over the last dimension of [batch, rows, columns], in the order of the GEMMs with the values.

    Repeated `wide` times: for few rows as wide as the values, so that the division needs no view; for many rows as
    narrow as a GEMM may be. The bits are the same.
    """
    return torch.bmm(weights, _ones(weights.shape[0], weights.shape[2], wide, weights.device))


@functools.lru_cache(maxsize=256)
def _ones(batch: int, columns: int, size: int, device: torch.device) -> torch.Tensor:
    # One shared block of ones: it stays in the CPU caches.
    return torch.ones(1, columns, size, device=device).expand(batch, -1, -1)


def _float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32. The check is cheaper than a conversion that changes nothing."""
    return x if x.dtype == torch.float32 else x.float()


def _blocks(rows: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Contiguous pages as a batch of blocks, [pages * kv heads, PAGE, size]; a view in float32."""
    return _float32(rows.narrow(0, first, count).flatten(0, 1))


def _least_rows(size: int) -> int:
    """Query rows below which a GEMM of inner dimension `size` uses another kernel (found by trial: docs)."""
    return max(4, -(-3 * size // 64))


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(index of the first, count) of each run of consecutive page numbers."""
    runs: list[tuple[int, int]] = []
    for index, page in enumerate(pages):
        if runs and pages[index - 1] + 1 == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
