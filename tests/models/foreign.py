"""Tiny random models of architectures that only transformers computes, saved as it saves them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

_FOLDER = Path(tempfile.mkdtemp(prefix="slipstream-foreign-"))

VOCABULARY, CONTEXT = 97, 300
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
# What is special about each is what the adapter has to carry.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {}),  # learned positions
    "opt": ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}),  # learned, counted from the mask by default
    "phi": ("PhiForCausalLM", {"intermediate_size": 64, "num_key_value_heads": 2}),  # half of a head turns
    "gpt_neox": ("GPTNeoXForCausalLM", {"intermediate_size": 64}),  # a quarter of a head turns
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 4}),  # neighbours turn; no fused attention
    "falcon": ("FalconForCausalLM", {}),  # one K/V head for all
    "phi3": ("Phi3ForCausalLM", {"intermediate_size": 64, "sliding_window": 40}),  # a window in every layer
    "cohere2": ("Cohere2ForCausalLM", {"intermediate_size": 64, "sliding_window": 40, **_MIXED}),  # in every other
    "deepseek": (  # keys and values of different widths, and experts
        "DeepseekV3ForCausalLM",
        {
            "intermediate_size": 64,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def foreign_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """One of KINDS, or any class of transformers, with weights that leave nothing at 0 or 1 and logits that differ."""
    name, settings = KINDS.get(kind, (kind, {}))
    chosen = getattr(transformers, name)
    torch.manual_seed(seed)
    model = chosen(chosen.config_class(**{**_SHAPE, **settings, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@functools.cache
def foreign_directory(kind: str, seed: int = 0) -> Path:
    """Such a model on disk, without a tokenizer."""
    return save(foreign_model(kind, seed))


def save(model: Any) -> Path:
    """Save a model into a directory of its own."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER))
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    if bars:
        transformers.utils.logging.enable_progress_bar()
    return folder
