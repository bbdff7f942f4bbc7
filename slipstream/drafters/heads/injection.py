"""K/V of a head's layers for tokens that the target has read, projected from its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slipstream.cache import LayerStore
from slipstream.drafters.heads.head_rows import StoredRows
from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import make_draft_linear
from slipstream.models.layers.norm import RowNorms
from slipstream.models.layers.rope import RopeTable
from slipstream.models.rows import PlacedRows


class Injection:
    """The projections of all layers as one GEMM."""

    def __init__(self, weight: torch.Tensor, norm: torch.Tensor, config: ModelConfig) -> None:
        """`weight` [layers * (k and v), width] and `norm` [width] in the dtype of the target, on its device."""
        self._project = make_draft_linear(weight)
        self._norm = RowNorms(norm, eps=config.norm_eps)
        self._config = replace(config, heads=0)  # rows without queries
        self._width = 2 * config.kv_heads * config.head_dim

    def write(self, hidden: torch.Tensor, rows: PlacedRows, rope: RopeTable, stores: Sequence[LayerStore]) -> None:
        """Write the K/V of tokens with these fused hidden states [rows, width] to their slots, in every layer."""
        placed = StoredRows(rows, self._config, rope)
        for kv, store in zip(self._project(self._norm(hidden)).split(self._width, 1), stores, strict=True):
            placed.put(kv.contiguous(), store)
