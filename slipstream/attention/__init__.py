"""Tree attention over pages."""

from collections.abc import Callable, Sequence

import torch

from slipstream.attention.blocks import BlockAttention
from slipstream.attention.exact_paged import ExactPagedAttention
from slipstream.attention.paged import PagedAttention, paged_available
from slipstream.attention.segment import Segment, chain_segment, tree_segment
from slipstream.attention.tiles import LaneTiles, Tiles
from slipstream.cache import LayerStore

# (q [rows, heads * size or more], the layer's pages, its window) -> [rows, heads * size]
Attention = Callable[[torch.Tensor, LayerStore, int | None], torch.Tensor]


def attention_over(
    segments: Sequence[Segment],
    heads: int,
    kv_heads: int,
    size: int,
    device: str,
    softcap: float | None = None,
    *,
    exact: bool = False,
) -> Attention:
    """The attention of one pass for this device; `exact`: batch-invariant on a GPU too."""
    if not paged_available(device):
        return BlockAttention(segments, heads, kv_heads, size, device, softcap)
    kind = ExactPagedAttention if exact else PagedAttention
    return kind(segments, heads, kv_heads, size, device, softcap)


def over_tiles(
    tiles: Tiles,
    heads: int,
    kv_heads: int,
    size: int,
    device: str,
    softcap: float | None = None,
    *,
    exact: bool = False,
) -> Attention:
    """The attention of a pass whose tiles are on the device; needs a GPU."""
    kind = ExactPagedAttention if exact else PagedAttention
    return kind((), heads, kv_heads, size, device, softcap, tiles)


__all__ = [
    "Attention",
    "BlockAttention",
    "ExactPagedAttention",
    "LaneTiles",
    "PagedAttention",
    "Segment",
    "Tiles",
    "attention_over",
    "chain_segment",
    "over_tiles",
    "paged_available",
    "tree_segment",
]
