"""The rows of one pass of a head: KV slots, rotary positions, attention masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream import attention
from slipstream.attention import Attention, Segment, Tiles, attention_over
from slipstream.cache import LayerStore
from slipstream.gpu.lanes import LaneRows
from slipstream.gpu.layer_ops import RowPlacement, rotate_and_store
from slipstream.models.config import ModelConfig
from slipstream.models.layers.rope import RopeTable, rotate_, turns_of_all_heads
from slipstream.models.native_rows import NativeRows, native_shape
from slipstream.models.rows import PlacedRows, Rows, tokens_of, wanted_rows


class StoredRows:
    """Rows whose K/V go to the pages of a store."""

    def __init__(self, rows: PlacedRows, config: ModelConfig, rope: RopeTable) -> None:
        self._placed = rows
        self._config = config
        table = rope.up_to(rows.highest)
        if rows.places is None:
            self._all_turns = turns_of_all_heads(table[rows.positions], config)
        else:
            self._turned = RowPlacement(table, rows.positions, *rows.places)

    def put(self, qkv: torch.Tensor, store: LayerStore) -> None:
        """Rotate q of [rows, width of qkv] in place; write k, rotated, and v to the rows' slots."""
        rows, config = self._placed, self._config
        if rows.places is not None:
            rotate_and_store(qkv, self._turned, store.both, config.heads, None)
        else:
            rotate_(qkv, self._all_turns)
            count, width = qkv.shape
            size, kv_heads = config.head_dim, config.kv_heads
            shape, strides = (2, kv_heads, count, size), (kv_heads * size, size, width, 1)
            rows.write(store, qkv.as_strided(shape, strides, qkv.storage_offset() + config.heads * size))


class HeadRows(StoredRows):
    """The part of a pass that does not depend on the layer."""

    native: NativeRows | None = None  # the rows for our own kernels, if those run

    def __init__(self, rows: PlacedRows, attend: Attention, config: ModelConfig, rope: RopeTable) -> None:
        super().__init__(rows, config, rope)
        self._attend = attend

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [rows, width], the rows whose logits are requested."""
        return hidden

    def mix(self, qkv: torch.Tensor, store: LayerStore) -> torch.Tensor:
        """Attention: [rows, width of qkv] -> [rows, heads * size]. K and V are written to the rows' slots."""
        self.put(qkv, store)
        return self._attend(qkv, store, None)


class PagedRows(HeadRows):
    """Rows laid out by the host."""

    def __init__(
        self, segments: Sequence[Segment], config: ModelConfig, rope: RopeTable, device: str, dtype: torch.dtype
    ) -> None:
        shape = native_shape(config) if device == "cpu" and dtype == torch.float32 else None
        if shape is not None:
            self.native = NativeRows(segments, shape, rope)
            self.tokens, self._wanted = tokens_of(segments, device), wanted_rows(segments, device)
            return
        rows = Rows(segments, device)
        self.tokens, self._wanted = rows.tokens, rows.wanted
        attend = attention_over(segments, config.heads, config.kv_heads, config.head_dim, device)
        super().__init__(rows, attend, config, rope)

    def mix(self, qkv: torch.Tensor, store: LayerStore) -> torch.Tensor:
        return super().mix(qkv, store) if self.native is None else self.native.mix(qkv, store)

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._wanted is None else hidden[self._wanted]


class LanedRows(HeadRows):
    """Rows of lanes, laid out on the device. All logits are requested."""

    def __init__(self, rows: LaneRows, tiles: Tiles, config: ModelConfig, rope: RopeTable, device: str) -> None:
        attend = attention.over_tiles(tiles, config.heads, config.kv_heads, config.head_dim, device)
        super().__init__(rows, attend, config, rope)
