"""The weights of a config and their shapes; the same for every file format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from slipstream.models.config import ModelConfig


def weight_names(config: ModelConfig) -> tuple[str, ...]:
    """Every canonical weight name of `config`, in the order of the forward pass."""
    return tuple(weight_shapes(config))


def expected_shape(config: ModelConfig, canonical_name: str) -> tuple[int, ...]:
    """The shape of one weight; KeyError for a name that `config` does not have."""
    return weight_shapes(config)[canonical_name]


@lru_cache(maxsize=16)
def weight_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Canonical name -> shape for the whole model."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed": table}
    kinds = [_layer_shapes(config, mixture) for mixture in (False, True)]
    for index in range(config.layers):
        layer = kinds[config.mixture(index)]
        shapes |= {f"layers.{index}.{part}": shape for part, shape in layer.items()}
    shapes["norm"] = (config.hidden_size,)
    if not config.tied_head:
        shapes["head"] = table
    return MappingProxyType(shapes)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether quantisation applies to a weight: norms, biases and routers stay in float32."""
    return len(shape) > 1 and not name.endswith(".router")


def _layer_shapes(config: ModelConfig, mixture: bool) -> dict[str, tuple[int, ...]]:
    """The weights of one layer, with or without experts."""
    width, middle = config.hidden_size, config.intermediate_size
    if mixture:
        middle = config.expert_size or middle
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (width,)}
    shapes |= {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    if config.qkv_bias:
        shapes |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.qk_norm:
        whole = config.qk_norm_whole
        shapes |= {"q_norm": (queries if whole else config.head_dim,), "k_norm": (keys if whole else config.head_dim,)}
    if config.post_norms:
        shapes |= {"attn_post_norm": (width,), "mlp_post_norm": (width,)}
    shapes["mlp_norm"] = (width,)
    mlp: dict[str, tuple[int, ...]] = {"gate": (middle, width), "up": (middle, width), "down": (width, middle)}
    if not mixture:
        return shapes | mlp
    shapes["router"] = (config.experts, width)
    for expert in range(config.experts):
        shapes |= {f"experts.{expert}.{part}": shape for part, shape in mlp.items()}
    return shapes
