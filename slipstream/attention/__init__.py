"""Tree attention over pages."""

from collections.abc import Callable, Sequence

import torch

from slipstream.attention.blocks import BlockAttention
from slipstream.attention.paged import PagedAttention, paged_available
from slipstream.attention.segment import Segment, tree_segment
from slipstream.attention.tiles import LaneTiles, Tiles
from slipstream.cache import LayerStore

# (q [rows, heads * size or more], the layer's pages, its window) -> [rows, heads * size]
Attention = Callable[[torch.Tensor, LayerStore, int | None], torch.Tensor]


def attention_over(
    segments: Sequence[Segment], heads: int, kv_heads: int, size: int, device: str, softcap: float | None = None
) -> Attention:
    """The attention of one pass, as it is done on this device."""
    kind = PagedAttention if paged_available(device) else BlockAttention
    return kind(segments, heads, kv_heads, size, device, softcap)


def over_tiles(
    tiles: Tiles, heads: int, kv_heads: int, size: int, device: str, softcap: float | None = None
) -> Attention:
    """The attention of a pass whose rows were laid out on the device; there must be a GPU."""
    return PagedAttention((), heads, kv_heads, size, device, softcap, tiles)


__all__ = [
    "Attention",
    "BlockAttention",
    "LaneTiles",
    "PagedAttention",
    "Segment",
    "Tiles",
    "attention_over",
    "over_tiles",
    "paged_available",
    "tree_segment",
]
