"""The rows of a pass in the layout of our own kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from slipstream.attention import Segment
from slipstream.cache import PAGE_SIZE, LayerStore
from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import native_works
from slipstream.models.layers.rope import RopeTable
from slipstream.native import kernels
from slipstream.native.call import Step, Words, program
from slipstream.native.kernel_args import Attention, Pass, Tile
from slipstream.native.linear import Lines
from slipstream.native.machine import threads
from slipstream.native.shape import Shape

_BLOCK = 16  # scores are computed for whole blocks of positions
_EVERYTHING = 1 << 40  # how far back a row without a window sees


def native_shape(config: ModelConfig) -> Shape | None:
    """The shape of a model's layers for our own kernels; None if they do not support it."""
    if config.attention_softcap is not None or config.head_dim % 4 or config.hidden_size % 4 or not native_works():
        return None
    lanes = kernels.here().lanes
    vectors = _vector(config.head_dim, lanes), _vector(config.hidden_size, lanes)
    return Shape(config.heads, config.kv_heads, config.head_dim, PAGE_SIZE, *vectors)


class NativeRows:
    """Positions of the rows of a pass, and what each of them sees."""

    def __init__(self, segments: Sequence[Segment], shape: Shape, rope: RopeTable) -> None:
        self._shape = shape
        self._in_use: list[Words] = []  # arrays whose addresses are in use
        count = sum([segment.rows for segment in segments])
        tiles = sum([-(-segment.rows // shape.tile_rows) for segment in segments])
        # One allocation for all: facts, then positions, lists and places of the rows, then tiles.
        words = np.empty(Pass.WORDS + 3 * count + Tile.WORDS * tiles, np.int64)
        self.facts, by_row = words[: Pass.WORDS], words[Pass.WORDS : Pass.WORDS + 3 * count].reshape(3, count)
        by_tile = words[Pass.WORDS + 3 * count :].reshape(tiles, Tile.WORDS)
        start, tile, highest = 0, 0, 0
        for segment in segments:
            stop, last = start + segment.rows, tile - (-segment.rows // shape.tile_rows)
            by_row[0, start:stop] = positions = segment.positions
            highest = max(highest, int(positions[-1]) if segment.causal else int(positions.max()))
            by_row[1, start:stop], shared = self._lists(segment)
            self._place(segment, by_row[2, start:stop], by_tile[tile:last], start)
            by_tile[tile:last, Tile.SHARED] = shared
            start, tile = stop, last
        self._turns = rope.pairs(by_row[0], highest)
        span = -(-(highest + 1) // _BLOCK) * _BLOCK
        self._scores = np.empty(threads() * shape.tile_rows * shape.group * span, np.float32)
        self.address: int = words.ctypes.data  # of the facts
        rows_at = self.address + 8 * Pass.WORDS
        self.facts[:] = (
            count,
            rows_at + 8 * 3 * count,
            tiles,
            *(rows_at + 8 * part * count for part in range(3)),
            self._turns.ctypes.data,
            self._scores.ctypes.data,
            span,
        )

    def _lists(self, segment: Segment) -> tuple[Words | int, Words | int]:
        """Where the rows' lists of slots begin, and how many positions the rows of each tile share."""
        committed = segment.committed
        if segment.causal:
            chain = _chain(1 << (committed + segment.rows).bit_length())
            self._in_use.append(chain)
            first: int = chain.ctypes.data + 8 * committed
            return first, segment.positions[:: self._shape.tile_rows] + 1
        of_row, column = segment.visible.nonzero()
        seen = column + committed
        self._in_use.append(seen)
        return seen.ctypes.data + 8 * np.searchsorted(of_row, np.arange(segment.rows)), committed

    def _place(self, segment: Segment, places: Words, tiles: Words, start: int) -> None:
        """Where K and V of the rows go, and which rows form a tile."""
        shape, rows = self._shape, segment.rows
        pages = np.array(segment.table.pages, np.int64)
        self._in_use.append(pages)
        page, first = divmod(segment.first_slot, PAGE_SIZE)
        if first + rows <= PAGE_SIZE:
            line = segment.table.pages[page] * shape.kv_heads * PAGE_SIZE + first
            places[:] = np.arange(line * shape.size, (line + rows) * shape.size, shape.size)
        else:
            slots = segment.slots
            places[:] = (pages[slots // PAGE_SIZE] * shape.kv_heads * PAGE_SIZE + slots % PAGE_SIZE) * shape.size
        firsts = np.arange(start, start + rows, shape.tile_rows)
        tiles[:, Tile.FIRST] = firsts
        tiles[:, Tile.ROWS] = shape.tile_rows
        tiles[-1, Tile.ROWS] = start + rows - int(firsts[-1])
        tiles[:, Tile.PAGES] = pages.ctypes.data
        tiles[:, Tile.COMMITTED] = segment.committed

    def mix(self, qkv: torch.Tensor, store: LayerStore, window: int | None = None) -> torch.Tensor:
        """Attention alone: [rows, width of qkv] -> [rows, heads * size]. Writes K and V to the rows' slots."""
        return self._mixed(qkv, store, window, rotated=False)

    def attend(self, qkv: torch.Tensor, store: LayerStore, window: int | None) -> torch.Tensor:
        """The same if q is already rotated, and K and V are already stored."""
        return self._mixed(qkv, store, window, rotated=True)

    def _mixed(self, qkv: torch.Tensor, store: LayerStore, window: int | None, *, rotated: bool) -> torch.Tensor:
        mixed = qkv.new_empty(len(qkv), self._shape.heads * self._shape.size)
        steps = attention_steps(self._shape, self.address, Lines.of(qkv), Lines.of(mixed), window)
        read_pages(*steps, store)
        words = program(steps[1:] if rotated else steps)
        kernels.layers(self._shape).run(words.ctypes.data)
        return mixed


def attention_steps(shape: Shape, facts: int, qkv: Lines, mixed: Lines, window: int | None) -> tuple[Step, Step]:
    """The steps of rotating and storing, and of attention; `read_pages` sets the pages that they use."""
    functions = kernels.layers(shape)
    rotating = np.array([facts, qkv.address, qkv.stride, 0, 0], np.int64)
    back = _EVERYTHING if window is None else window
    attending = np.array([facts, qkv.address, qkv.stride, 0, 0, mixed.address, mixed.stride, back], np.int64)
    return (functions["rotate"], rotating), (functions["attend"], attending)


def read_pages(rotating: Step, attending: Step, store: LayerStore) -> None:
    """Point both steps to the pages of a layer."""
    keys, values = store.keys.data_ptr(), store.values.data_ptr()
    rotating[1][Attention.KEYS], rotating[1][Attention.VALUES] = keys, values
    attending[1][Attention.KEYS], attending[1][Attention.VALUES] = keys, values


@functools.lru_cache(maxsize=8)
def _chain(length: int) -> Words:
    """0, 1, 2, ...: the slots of rows without a tree."""
    return np.arange(length, dtype=np.int64)


def _vector(width: int, lanes: int) -> int:
    """The widest vector that divides a width."""
    while width % lanes:
        lanes //= 2
    return lanes
