"""The matrices of a layer, extracted from a decoder that keeps them folded and packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.layers.mlp import DenseMLP
from slipstream.models.model import Model


@dataclass(frozen=True)
class PlainLayer:
    """A layer of RMS norms, rotary attention and a gated MLP (silu), in float32 on the CPU.

    The weights of the norms are folded into the matrices after them. In q and k, rotated pairs of dimensions are
    adjacent; scores are q k / sqrt(head size).
    """

    qkv: torch.Tensor  # [(heads + 2 * kv heads) * size, width]
    out: torch.Tensor  # [width, heads * size]
    gate_up: torch.Tensor  # [2 * middle, width]
    down: torch.Tensor  # [width, middle]


def plain_layer(model: Model, index: int) -> PlainLayer | None:
    """The matrices of a layer, or None if it computes anything else than a `PlainLayer`."""
    config = model.config
    if not isinstance(model, Decoder) or not _is_plain(config, index):
        return None
    layer = model.layers[index]
    assert isinstance(layer.mlp, DenseMLP)

    def matrix(product: Callable[[torch.Tensor], torch.Tensor], width: int) -> torch.Tensor:
        """A matrix of which only the packed form may be kept: a GEMM with the identity matrix gives it back."""
        return product(torch.eye(width, dtype=model.dtype, device=model.device)).T.float().cpu()

    width, queries, middle = config.hidden_size, config.heads * config.head_dim, config.intermediate_size
    root = width**0.5  # the decoder's norm leaves it out, and the matrix after it includes it
    qkv = matrix(layer.qkv, width) / root
    qkv[:queries] *= config.head_dim**0.5
    gate, up = (matrix(layer.mlp.gate_up, width) / root).chunk(2)  # both are padded with zero units
    down = matrix(layer.mlp.down, len(up))
    return PlainLayer(qkv, matrix(layer.out, queries), torch.cat([gate[:middle], up[:middle]]), down[:, :middle])


def _is_plain(config: ModelConfig, layer: int) -> bool:
    normed = config.qk_norm or config.post_norms
    limited = config.qkv_clip is not None or config.attention_softcap is not None
    other = config.qkv_bias or config.mixture(layer) or config.activation != "silu" or config.local_rope(layer)
    return not (normed or limited or other)
