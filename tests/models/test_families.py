"""Every family that we claim: logits equal to transformers', for a prompt and at every node of a random tree."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.models.decoder import Decoder
from slipstream.models.load import load_model
from slipstream.tree import TokenTree

STORE = "test"
SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500_000.0,
}
# Caps that bite: scores and logits of these weights go beyond them.
GEMMA2 = {"head_dim": 24, "sliding_window": 40, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5}
GEMMA2 |= {"final_logit_softcapping": 0.5, "num_hidden_layers": 4}
GEMMA3 = {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 48, "num_hidden_layers": 7}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 96}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-untied": ("Gemma2", {**GEMMA2, "tie_word_embeddings": False, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3", {**GEMMA3, "rope_parameters": TWO_ROPES}),
    "gemma3-untied": ("Gemma3", {**GEMMA3, "tie_word_embeddings": False, "final_logit_softcapping": 0.5}),
    "qwen3moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3moe-dense": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0], "tie_word_embeddings": True}),
    "qwen3moe-step": ("Qwen3Moe", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "qwen3moe-window": ("Qwen3Moe", {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 40}),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe-clip": ("Olmoe", {**OLMOE, "clip_qkv": 0.5, "num_key_value_heads": 2, "norm_topk_prob": True}),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where the name does not follow from the model's


def build(name: str, folder: Path, noise: float = 0.05, **changes: Any) -> transformers.PreTrainedModel:
    """A tiny random model of a family, saved in `folder`, with some of its config changed."""
    kind, extra = FAMILIES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**{**SHAPE, **extra, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are constant at birth; errors there must show
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    return model


def tree_logits(model: Decoder, prompt: list[int], tree: TokenTree, chunk: int) -> torch.Tensor:
    """Logits at every node, after a prompt fed in chunks."""
    cache = PagedCache(8)
    model.add_store(cache, STORE)
    table = cache.open([])
    cache.reserve(table, len(prompt) + len(tree))
    for start in range(0, len(prompt), chunk):
        model.forward(cache, STORE, [tree_segment(table, start, prompt[start : start + chunk], None)])
    return model.forward(cache, STORE, [tree_segment(table, len(prompt), [tree.tokens[0]], tree)]).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = build(name, tmp_path)
    ours, _ = load_model(tmp_path, dtype="float32", device="cpu")
    chooser = random.Random(1)
    tokens = [chooser.randrange(SHAPE["vocab_size"]) for _ in range(150)]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
        chain = TokenTree.chain(tokens[0], tokens[1:])
        torch.testing.assert_close(tree_logits(ours, [], chain, 1), expected, atol=1e-4, rtol=0)

        prompt = tokens[:130]  # the tree crosses no page, the prompt does
        tree = TokenTree(tokens[130])
        for _ in range(25):
            tree.add(chooser.randrange(max(0, len(tree) - 6), len(tree)), chooser.randrange(SHAPE["vocab_size"]))
        got = tree_logits(ours, prompt, tree, 48)
        for node in range(len(tree)):
            path = [*prompt, tree.tokens[0], *tree.path_tokens(node)]
            expected = theirs(torch.tensor([path])).logits[0, -1]
            torch.testing.assert_close(got[node], expected, atol=1e-4, rtol=0)


def test_only_wanted_rows_get_logits_and_any_layer_can_be_tapped_or_left_out(tmp_path: Path) -> None:
    theirs = build("llama2", tmp_path)
    ours, _ = load_model(tmp_path, dtype="float32", device="cpu")
    cache = PagedCache(4)
    ours.add_store(cache, STORE)
    table = cache.open([])
    cache.reserve(table, 100)
    tokens = [5, 9, 17, 100, 3]
    with torch.no_grad():
        states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        segment = tree_segment(table, 0, tokens, TokenTree(tokens[-1]))
        output = ours.forward(cache, STORE, [segment], taps=[0, 1])
        assert output.logits.shape == (1, SHAPE["vocab_size"])
        for layer in (0, 1):
            torch.testing.assert_close(output.taps[layer], states[layer + 1][0], atol=1e-4, rtol=0)
        first_only = ours.forward(cache, STORE, [segment], layers=[0])
        torch.testing.assert_close(first_only.hidden, states[1][0], atol=1e-4, rtol=0)
        subset = torch.tensor([3, 77, 200])
        torch.testing.assert_close(ours.head(output.hidden, subset), ours.head(output.hidden)[:, subset])


def test_a_reduced_vocabulary_of_a_tied_head_gives_the_same_logits(tmp_path: Path) -> None:
    build("smollm2", tmp_path)
    ours, _ = load_model(tmp_path, dtype="float32", device="cpu")
    hidden = torch.randn(4, 96)
    subset = torch.tensor([0, 8, 210])
    torch.testing.assert_close(ours.head(hidden, subset), ours.head(hidden)[:, subset])
