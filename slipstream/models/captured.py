"""Host-driven passes as captured graphs: for everything that needs the host between two passes.

A pass is padded to one of a few sizes. Its inputs are copied at once to a fixed buffer, and padding rows write to a
page that no sequence owns. Long prompts run eagerly: there the GPU's work takes longer than the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention import Segment, Tiles
from slipstream.attention.tiles import FACTS, query_block, tile_arrays
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache
from slipstream.gpu.graphs import Graphs, bucket
from slipstream.models.model import PassOutput

if TYPE_CHECKING:
    from slipstream.models.decoder import Decoder

MOST_ROWS = 256
_SPARE = 256  # rows that may be after the end of the context

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Shape:
    """Sizes that a pass is padded to."""

    store: str
    rows: int
    tiles: int
    sequences: int
    pages: int
    open_rows: int
    words: int
    trees: bool
    taps: tuple[int, ...]

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The arrays that are copied: tokens, positions, pages and offsets in them; then those of the tiles."""
        row = (self.rows,)
        return [row] * 4 + [
            (FACTS, self.tiles),
            (self.sequences, self.pages),
            row,
            (self.open_rows,),
            (self.rows, self.words),
        ]


@dataclass
class _Pass:
    """A pass of one shape: its inputs, and its last outputs."""

    tiles: Tiles
    rows: list[torch.Tensor]  # int32 [rows]: tokens, positions, pages, offsets
    flat: torch.Tensor  # all inputs, int32
    logits: torch.Tensor = field(init=False)
    hidden: torch.Tensor = field(init=False)
    tapped: dict[int, torch.Tensor] = field(init=False)


class _FilledRows:
    """The rows of a padded pass as the layers see them."""

    def __init__(self, rows: list[torch.Tensor], highest: int) -> None:
        self.tokens, self.positions, pages, places = (part.long() for part in rows)
        self.highest = highest
        self.places: tuple[torch.Tensor, torch.Tensor] | None = (pages, places)

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Write k and v [2, kv heads, rows, size] to one layer."""
        assert self.places is not None
        pages, places = self.places
        layer.both[:, pages, :, places] = kv.permute(2, 0, 1, 3)


class CapturedPasses:
    """Captured passes over one cache, which is not referenced here; they must be dropped together."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._passes: dict[_Shape, _Pass] = {}
        self.graphs = Graphs(model.device)

    @staticmethod
    def takes(segments: Sequence[Segment]) -> bool:
        """Whether a graph pays for these rows: a decoding step in which all logits are needed."""
        small = sum(s.rows for s in segments) <= MOST_ROWS
        return small and all(s.logits_from == 0 and s.prepared is None for s in segments)

    def run(self, cache: PagedCache, store: str, segments: Sequence[Segment], taps: Sequence[int]) -> PassOutput:
        """The pass over all rows of all segments."""
        config = self._model.config
        group = config.group
        rows = sum(s.rows for s in segments)
        filled = bucket(rows)
        queries = query_block(group, filled)
        of_tiles = tile_arrays(segments, queries // group)
        fields, tables, _, open_positions, bits = of_tiles
        shape = _Shape(
            store,
            filled,
            bucket(fields.shape[1]),
            bucket(len(segments)),
            max(-(-(config.context + _SPARE) // PAGE_SIZE), tables.shape[1]),
            bucket(len(open_positions)),
            bits.shape[1],
            any(not s.causal for s in segments),
            tuple(taps),
        )
        held = self._passes.get(shape)
        if held is None:
            held = self._passes[shape] = self._made(shape, queries)
        idle = cache.idle_page
        arrays = zip([*_row_arrays(segments), *of_tiles], shape.parts, (0, 0, idle, 0, 0, idle, 0, 0, 0), strict=True)
        held.flat.copy_(torch.from_numpy(np.concatenate([_filled(*array) for array in arrays])))
        self.graphs.run(shape, lambda: self._pass(held, shape, cache.layers(store)))
        tapped = {layer: hidden[:rows].clone() for layer, hidden in held.tapped.items()}
        return PassOutput(held.logits[:rows].clone(), held.hidden[:rows].clone(), tapped)

    def _made(self, shape: _Shape, queries: int) -> _Pass:
        sizes = [int(np.prod(part)) for part in shape.parts]
        starts = [-(-size // 4) * 4 for size in sizes]  # kernels need arrays that are aligned to 16 bytes
        flat = torch.zeros(sum(starts), dtype=torch.int32, device=self._model.device)
        views = [
            piece[:size].view(part) for piece, size, part in zip(flat.split(starts), sizes, shape.parts, strict=True)
        ]
        fields, tables, positions, open_positions, bits = views[4:]
        tiles = Tiles(shape.rows, queries, shape.trees, fields, tables, positions, open_positions, bits)
        return _Pass(tiles, views[:4], flat)

    def _pass(self, held: _Pass, shape: _Shape, data: Sequence[LayerStore]) -> None:
        model = self._model
        rows = _FilledRows(held.rows, model.config.context - 1)
        x = model.embed(rows.tokens)
        layers = range(model.config.layers)
        held.tapped = model.run_(x, rows, model.attention_over(held.tiles), data, layers, shape.taps)
        held.hidden, held.logits = x, model.head(x)


def _row_arrays(segments: Sequence[Segment]) -> list[Numbers]:
    """Tokens, positions, pages and offsets in them, row by row."""
    tokens = np.array([token for s in segments for token in s.tokens], dtype=np.int64)
    positions = np.concatenate([s.positions for s in segments])
    slots = np.concatenate([s.slots for s in segments])
    pages = np.concatenate([np.asarray(s.table.pages)[s.slots // PAGE_SIZE] for s in segments])
    return [part.astype(np.int32) for part in (tokens, positions, pages, slots % PAGE_SIZE)]


def _filled(array: Numbers, shape: tuple[int, ...], value: int) -> Numbers:
    """The array padded with `value` to that shape, flat, and with zeros to the next 16 bytes."""
    size = int(np.prod(shape))
    flat = np.zeros(-(-size // 4) * 4, dtype=np.int32)
    whole = flat[:size].reshape(shape)
    whole[...] = value
    whole[tuple(slice(extent) for extent in array.shape)] = array
    return flat
