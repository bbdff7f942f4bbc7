"""The same weights in transformers: the reference for speed here and for logits in the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.models.formats.checkpoint import Checkpoint


def transformers_twin(checkpoint: Checkpoint, layers: Sequence[int] | None = None) -> Any:
    """A float32 LlamaForCausalLM with the weights of a dense Llama checkpoint of any format, or some of its layers."""
    import transformers

    config = checkpoint.config
    kept = range(config.layers) if layers is None else layers
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=len(kept),
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_head,
            bos_token_id=config.bos_id,
            eos_token_id=list(config.eos_ids),
        )
    ).eval()
    weights = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm"}
    weights["lm_head.weight"] = "embed" if config.tied_head else "head"
    for index, layer in enumerate(kept):
        ours, theirs = f"layers.{layer}", f"model.layers.{index}"
        weights[f"{theirs}.input_layernorm.weight"] = f"{ours}.attn_norm"
        weights[f"{theirs}.post_attention_layernorm.weight"] = f"{ours}.mlp_norm"
        for name in "qkvo":
            weights[f"{theirs}.self_attn.{name}_proj.weight"] = f"{ours}.{name}"
        for name in ("gate", "up", "down"):
            weights[f"{theirs}.mlp.{name}_proj.weight"] = f"{ours}.{name}"
    state: dict[str, torch.Tensor] = {theirs: checkpoint.weight(ours).float() for theirs, ours in weights.items()}
    twin.load_state_dict(state, strict=True)
    return twin
