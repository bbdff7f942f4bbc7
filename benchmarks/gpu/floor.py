"""The floor of a step: the matrix products of the model, one after the other in one graph, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import captured, device_ms
from slipstream.models.decoder import Decoder
from slipstream.models.mlp import DenseMLP


@dataclass(frozen=True)
class Floor:
    """One number of rows."""

    rows: int
    ms: float
    gb_per_s: float  # of weights that were read


def weight_bytes(model: Decoder) -> int:
    """What the products of one pass read, embeddings left out."""
    config, size = model.config, model.dtype.itemsize
    attention = config.hidden_size * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return size * (config.layers * (attention + mlp) + config.hidden_size * config.vocab_size)


def floor(model: Decoder, rows: int) -> Floor:
    """The products over so many rows."""
    config = model.config

    def some(width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=model.dtype, device=model.device)

    x, mixed, middle = some(config.hidden_size), some(config.heads * config.head_dim), some(config.intermediate_size)

    def products() -> None:
        for layer in model.layers:
            assert isinstance(layer.mlp, DenseMLP)
            layer.qkv(x)
            layer.out(mixed)
            layer.mlp.gate_up(x)
            layer.mlp.down(middle)
        model.head(x)

    with torch.inference_mode():
        ms = device_ms(captured(products))
    return Floor(rows, ms, weight_bytes(model) / ms / 1e6)
