"""Host-driven passes as captured CUDA graphs: for requests that need the host between two passes.

A pass is padded to one of a few sizes. Its inputs are copied at once to a fixed buffer, and padding rows write to a
page that no sequence owns. Passes over prompts are captured, too. Their size depends on the number of rows alone, so a
few graphs serve every mixture of prompts. Long prompts run eagerly: there the GPU's work takes longer than the
launches.
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
MOST_PROMPT_ROWS = 512  # rows of a captured pass without trees that needs few logits
_FEW = 16  # rows of a prompt at least; rows with logits and sequences that every pass over prompts has room for
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
    wanted: int  # rows with logits; 0: all

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The arrays that are copied: tokens, positions, pages, offsets in them; rows with logits; those of tiles."""
        row = (self.rows,)
        return [row] * 4 + [
            (self.wanted,),
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
    wanted: torch.Tensor  # int32: the rows with logits
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
        """Whether a graph is faster for these rows: a decoding step, or prompts that are not long."""
        if any(s.prepared is not None for s in segments):
            return False
        rows, wanted = sum(s.rows for s in segments), len(_wanted(segments))
        prompts = wanted <= _FEW and all(s.causal for s in segments)
        return rows <= MOST_PROMPT_ROWS if prompts else rows <= MOST_ROWS and wanted == rows

    def run(self, cache: PagedCache, store: str, segments: Sequence[Segment], taps: Sequence[int]) -> PassOutput:
        """The pass over all rows of all segments."""
        config = self._model.config
        group = config.group
        wanted = _wanted(segments)
        rows = sum(s.rows for s in segments)
        trees, all_logits = any(not s.causal for s in segments), len(wanted) == rows
        filled = bucket(rows) if all_logits else max(_FEW, bucket(rows))
        queries = query_block(group, filled)
        of_tiles = tile_arrays(segments, queries // group)
        fields, tables, _, open_positions, bits = of_tiles
        sequences = bucket(len(segments)) if trees else max(_FEW, bucket(len(segments)))
        tiles = fields.shape[1] if trees else -(-filled // (queries // group)) + sequences
        shape = _Shape(
            store,
            filled,
            bucket(tiles),
            sequences,
            max(-(-(config.context + _SPARE) // PAGE_SIZE), tables.shape[1]),
            bucket(len(open_positions)),
            bits.shape[1],
            trees,
            tuple(taps),
            0 if all_logits else _FEW,
        )
        held = self._passes.get(shape)
        if held is None:
            held = self._passes[shape] = self._made(shape, queries)
        idle = cache.idle_page
        picked = wanted[: shape.wanted]
        given, padding = [*_row_arrays(segments), picked, *of_tiles], (0, 0, idle, 0, 0, 0, idle, 0, 0, 0)
        arrays = zip(given, shape.parts, padding, strict=True)
        held.flat.copy_(torch.from_numpy(np.concatenate([_filled(*array) for array in arrays])))
        self.graphs.run(shape, lambda: self._pass(held, shape, cache.layers(store)))
        tapped = {layer: hidden[:rows].clone() for layer, hidden in held.tapped.items()}
        return PassOutput(held.logits[: len(wanted)].clone(), held.hidden[:rows].clone(), tapped)

    def _made(self, shape: _Shape, queries: int) -> _Pass:
        sizes = [int(np.prod(part)) for part in shape.parts]
        starts = [-(-size // 4) * 4 for size in sizes]  # kernels need arrays that are aligned to 16 bytes
        flat = torch.zeros(sum(starts), dtype=torch.int32, device=self._model.device)
        views = [
            piece[:size].view(part) for piece, size, part in zip(flat.split(starts), sizes, shape.parts, strict=True)
        ]
        fields, tables, positions, open_positions, bits = views[5:]
        # Padding has no rows, so the number of tiles does not tell how many rows each has.
        tiles = Tiles(shape.rows, queries, shape.trees, False, fields, tables, positions, open_positions, bits)
        return _Pass(tiles, views[:4], views[4], flat)

    def _pass(self, held: _Pass, shape: _Shape, data: Sequence[LayerStore]) -> None:
        model = self._model
        rows = _FilledRows(held.rows, model.config.context - 1)
        x = model.embed(rows.tokens)
        layers = range(model.config.layers)
        held.tapped = model.run_(x, rows, model.attention_over(held.tiles), data, layers, shape.taps)
        held.hidden, held.logits = x, model.head(x[held.wanted.long()] if shape.wanted else x)


def _wanted(segments: Sequence[Segment]) -> Numbers:
    """The rows of a pass whose logits are needed."""
    starts = np.cumsum([0, *(s.rows for s in segments)])
    return np.concatenate(
        [np.arange(start + s.logits_from, start + s.rows) for s, start in zip(segments, starts, strict=False)]
    ).astype(np.int32)


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
