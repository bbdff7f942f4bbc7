"""The rows of one pass of a head: where its K/V go, how positions turn them, what they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from slipstream import attention
from slipstream.attention import Segment, Tiles, attention_over
from slipstream.cache import LayerStore
from slipstream.lanes import LaneRows
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Rows
from slipstream.models.rope import RopeTable


class HeadRows(Protocol):
    """Everything about a pass that does not depend on the layer."""

    turns: torch.Tensor  # complex [rows, width of qkv / 2]

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [rows, width], the rows whose logits are asked for."""
        ...

    def write(self, store: LayerStore, kv: torch.Tensor) -> None:
        """Put k and v [2, kv heads, rows, size] where the rows lie."""
        ...

    def attend(self, qkv: torch.Tensor, store: LayerStore) -> torch.Tensor:
        """[rows, width of qkv] -> [rows, heads * size]."""
        ...


def _turns(rope: RopeTable, positions: torch.Tensor, highest: int, config: ModelConfig) -> torch.Tensor:
    turns = rope.at(positions, highest).repeat(1, config.heads + config.kv_heads)
    return functional.pad(turns, (0, config.kv_heads * config.head_dim // 2), value=1.0)  # v is not turned


class PagedRows:
    """Rows that the host has laid out."""

    def __init__(self, segments: Sequence[Segment], config: ModelConfig, rope: RopeTable, device: str) -> None:
        self._rows = Rows(segments, device)
        self._attention = attention_over(segments, config.heads, config.kv_heads, config.head_dim, device)
        self.turns = _turns(rope, self._rows.positions, self._rows.highest, config)

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids of the rows."""
        return self._rows.tokens

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._rows.wanted is None else hidden[self._rows.wanted]

    def write(self, store: LayerStore, kv: torch.Tensor) -> None:
        self._rows.write(store, kv)

    def attend(self, qkv: torch.Tensor, store: LayerStore) -> torch.Tensor:
        return self._attention(qkv, store, None)


class LanedRows:
    """Rows of lanes, laid out on the device. All logits are wanted."""

    def __init__(self, rows: LaneRows, tiles: Tiles, config: ModelConfig, rope: RopeTable, device: str) -> None:
        self._rows = rows
        self._attention = attention.over_tiles(tiles, config.heads, config.kv_heads, config.head_dim, device)
        self.turns = _turns(rope, rows.positions, rows.highest, config)

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def write(self, store: LayerStore, kv: torch.Tensor) -> None:
        self._rows.write(store, kv)

    def attend(self, qkv: torch.Tensor, store: LayerStore) -> torch.Tensor:
        return self._attention(qkv, store, None)
