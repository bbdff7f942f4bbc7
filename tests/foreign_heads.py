"""Drafters of other projects for a tiny target: random weights in their layouts, as files."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream import LLM
from slipstream.models.view import TargetView
from tests.tiny import tiny_directory

TOKENS, WIDTH, LAYERS = 97, 64, 6
HEADS, KV_HEADS, HEAD_DIM, MLP, TAPS = 8, 4, 12, 80, 3  # none of them the target's
_FOLDER = Path(tempfile.mkdtemp(prefix="slipstream-foreign-"))


def target_directory() -> Path:
    """A target with enough layers to read three of them."""
    return tiny_directory(layers=LAYERS, context=300, characters=True)


def target_llm(speculate: str | None = None) -> LLM:
    return LLM(target_directory(), speculate=speculate)


@functools.cache
def target_view() -> TargetView:
    return target_llm().target


def folder(config: dict[str, Any] | None, weights: dict[str, torch.Tensor], pickled: str = "") -> Path:
    """A directory with them; `pickled`: the name of a file as torch writes it."""
    place = Path(tempfile.mkdtemp(dir=_FOLDER))
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, place / pickled)
    else:
        save_file(weights, place / "model.safetensors")
    return place


def layer_config(**changes: Any) -> dict[str, Any]:
    """What a config says of a head's layer."""
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "vocab_size": TOKENS,
        "hidden_size": WIDTH, "intermediate_size": MLP, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-4, "rope_theta": 5000.0,
        "max_position_embeddings": 300, **changes,
    }  # fmt: skip


def original_config(**changes: Any) -> dict[str, Any]:
    """SafeAILab's config.json."""
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer_config(), "draft_vocab_size": 61, **changes}


def speculators_config(**changes: Any) -> dict[str, Any]:
    """That of speculators. It taps what layers 1, 4 and 5 read, and adds to the normed hidden state."""
    return {
        "speculators_model_type": "eagle3", "transformer_layer_config": layer_config(), "draft_vocab_size": 61,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 5], "norm_before_residual": True, **changes,
    }  # fmt: skip


def eagle_weights(
    prefix: str = "layers.0.", tokens: int = 61, norm_before_fc: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random weights of a head; `prefix` is how its layer is called."""
    generator = torch.Generator().manual_seed(7)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 1.2 * columns**-0.5).to(dtype)

    def norm(size: int = WIDTH) -> torch.Tensor:
        return (1 + 0.3 * torch.randn(size, generator=generator)).to(dtype)

    vocab = torch.randperm(TOKENS, generator=generator)[:tokens].sort().values
    weights = {
        "fc.weight": matrix(WIDTH, TAPS * WIDTH),
        f"{prefix}self_attn.q_proj.weight": matrix(queries, 2 * WIDTH),
        f"{prefix}self_attn.k_proj.weight": matrix(keys, 2 * WIDTH),
        f"{prefix}self_attn.v_proj.weight": matrix(keys, 2 * WIDTH),
        f"{prefix}self_attn.o_proj.weight": matrix(WIDTH, queries),
        f"{prefix}mlp.gate_proj.weight": matrix(MLP, WIDTH),
        f"{prefix}mlp.up_proj.weight": matrix(MLP, WIDTH),
        f"{prefix}mlp.down_proj.weight": matrix(WIDTH, MLP),
        f"{prefix}hidden_norm.weight": norm(),
        f"{prefix}input_layernorm.weight": norm(),
        f"{prefix}post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(tokens, WIDTH) * 4,
        "d2t": vocab - torch.arange(tokens),
        "t2d": torch.zeros(TOKENS, dtype=torch.bool).index_fill(0, vocab, True),
    }
    if norm_before_fc:
        weights["input_norm.weight"] = norm(TAPS * WIDTH)
    return weights


def medusa_weights(heads: int = 3, tokens: int = TOKENS, blocks: int = 1) -> dict[str, torch.Tensor]:
    """Random heads as they were published."""
    generator = torch.Generator().manual_seed(8)
    weights: dict[str, torch.Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            weights[f"{head}.{block}.linear.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.2
            weights[f"{head}.{block}.linear.bias"] = torch.randn(WIDTH, generator=generator)
        weights[f"{head}.{blocks}.weight"] = torch.randn(tokens, WIDTH, generator=generator) * 0.5
    return weights
