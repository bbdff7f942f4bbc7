"""The rows of one pass of a head: where its K/V go, how positions turn them, what they see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from slipstream.attention import Segment, attention_over
from slipstream.cache import LayerStore
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Rows
from slipstream.models.rope import RopeTable


class PagedRows:
    """Everything about a pass that does not depend on the layer."""

    def __init__(self, segments: Sequence[Segment], config: ModelConfig, rope: RopeTable, device: str) -> None:
        self._rows = Rows(segments, device)
        self._attention = attention_over(segments, config.heads, config.kv_heads, config.head_dim, device)
        turns = rope.at(self._rows.positions, self._rows.highest).repeat(1, config.heads + config.kv_heads)
        self.turns = functional.pad(turns, (0, config.kv_heads * config.head_dim // 2), value=1.0)  # v is not turned

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids of the rows."""
        return self._rows.tokens

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [rows, width], the rows whose logits are asked for."""
        return hidden if self._rows.wanted is None else hidden[self._rows.wanted]

    def write(self, store: LayerStore, kv: torch.Tensor) -> None:
        """Put k and v [2, kv heads, rows, size] where the rows lie."""
        self._rows.write(store, kv)

    def attend(self, qkv: torch.Tensor, store: LayerStore) -> torch.Tensor:
        """[rows, width of qkv] -> [rows, heads * size]."""
        return self._attention(qkv, store, None)
