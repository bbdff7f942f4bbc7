"""The rows of a pass in the layout of our own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from slipstream.cache import PAGE_SIZE, LayerStore, PageTable
from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import native_works
from slipstream.models.layers.rope import RopeTable
from slipstream.native import kernels
from slipstream.native.call import Step, address_of, program
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


class RowGroup(Protocol):
    """New rows of one sequence, which go to the slots from `first_slot` on: a `Segment`, or less."""

    @property
    def table(self) -> PageTable:
        """The pages of the sequence."""

    @property
    def committed(self) -> int:
        """Slots that every row sees."""

    @property
    def first_slot(self) -> int:
        """The slot of the first row."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    @property
    def paths(self) -> Sequence[Sequence[int]] | None:
        """Further slots that each row sees, its own last; None: all slots up to its own."""


class NativeRows:
    """Positions of the rows of a pass, and what each of them sees."""

    def __init__(self, groups: Sequence[RowGroup], shape: Shape, rope: RopeTable) -> None:
        self._shape = shape
        # Plain lists, and one array of all: numpy's operations cost more than these few numbers.
        positions: list[int] = []
        places: list[int] = []
        tiles: list[int] = []
        lists: list[int] = []  # where the list of each row begins: indices into `numbers`
        numbers: list[int] = []  # page tables and lists of slots
        line, most = shape.kv_heads * PAGE_SIZE, shape.tile_rows
        for group in groups:
            pages, committed, first, count = group.table.pages, group.committed, group.first_slot, group.rows
            slots, paths = range(first, first + count), group.paths
            places += [(pages[slot // PAGE_SIZE] * line + slot % PAGE_SIZE) * shape.size for slot in slots]
            table, start = len(numbers), len(positions)
            numbers += pages
            if paths is None:
                positions += slots
                lists += [len(numbers)] * count
                numbers += range(committed, first + count)
            else:
                for path in paths:
                    positions.append(committed + len(path) - 1)
                    lists.append(len(numbers))
                    numbers += path
            for row in range(0, count, most):
                shared = committed if paths is not None else first + row + 1
                tiles += (start + row, min(most, count - row), table, shared, committed)
        self._fill(positions, lists, places, tiles, numbers)
        self._turns = rope.pairs(self._numbers[Pass.LENGTH : Pass.LENGTH + len(positions)], max(positions))
        span = -(-(max(positions) + 1) // _BLOCK) * _BLOCK
        self._scores = np.empty(threads() * most * shape.group * span, np.float32)
        self.facts[Pass.TURNS :] = address_of(self._turns), address_of(self._scores), span

    def _fill(
        self, positions: list[int], lists: list[int], places: list[int], tiles: list[int], numbers: list[int]
    ) -> None:
        """One array for all: facts, then positions, lists and places of the rows, tiles, and what those point to."""
        count, rows_at = len(positions), Pass.LENGTH
        tiles_at = rows_at + 3 * count
        numbers_at = tiles_at + len(tiles)
        self._numbers = np.empty(numbers_at + len(numbers), np.int64)
        self.facts = self._numbers[:rows_at]
        self.address = address_of(self._numbers)  # the address of the facts
        first = self.address + 8 * numbers_at
        tiles[Tile.PAGES :: Tile.LENGTH] = [first + 8 * index for index in tiles[Tile.PAGES :: Tile.LENGTH]]
        by_row = range(self.address + 8 * rows_at, self.address + 8 * tiles_at, 8 * count)
        facts = count, self.address + 8 * tiles_at, len(tiles) // Tile.LENGTH, *by_row, 0, 0, 0
        self._numbers[:] = [*facts, *positions, *(first + 8 * index for index in lists), *places, *tiles, *numbers]

    def mix(self, qkv: torch.Tensor, store: LayerStore, window: int | None = None) -> torch.Tensor:
        """Attention alone: [rows, width of qkv] -> [rows, heads * size]. Writes K and V to the rows' slots."""
        return self._mixed(qkv, store, window, rotated=False)

    def attend(self, qkv: torch.Tensor, store: LayerStore, window: int | None) -> torch.Tensor:
        """Attention for q that is already rotated, and K and V that are already stored."""
        return self._mixed(qkv, store, window, rotated=True)

    def _mixed(self, qkv: torch.Tensor, store: LayerStore, window: int | None, *, rotated: bool) -> torch.Tensor:
        mixed = qkv.new_empty(len(qkv), self._shape.heads * self._shape.size)
        steps = attention_steps(self._shape, self.address, Lines.of(qkv), Lines.of(mixed), window)
        read_pages(*steps, store)
        args = program(steps[1:] if rotated else steps)
        kernels.layers(self._shape).run(address_of(args))
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


def _vector(width: int, lanes: int) -> int:
    """The widest vector that divides a width."""
    while width % lanes:
        lanes //= 2
    return lanes
