"""Tiny random models, saved as real Hugging Face directories so that the real loader reads them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from slipstream import LLM, SamplingParams
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.shapes import expected_shape
from slipstream.types import Output

_FOLDER = Path(tempfile.mkdtemp(prefix="slipstream-tiny-"))
_CAPTURES = Decoder.__dict__["captures"]  # as it is where no test has changed it
_PLAIN: dict[str, list[Output]] = {}

_HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"{p}": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{p: f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


@functools.cache
def tiny_directory(
    seed: int = 0,
    vocab_size: int = 97,
    layers: int = 2,
    context: int = 512,
    sharpness: float = 4.0,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    sliding_window: int | None = None,
    characters: bool = False,
    eos: int | None = None,
) -> Path:
    """A random Llama (Mistral, with a window) of two layers. `sharpness` scales the logits: larger is more certain.

    `characters`: with a tokenizer that has one token per printable ASCII character (the last two are special).
    """
    config = ModelConfig("llama", vocab_size, 64, layers, heads, kv_heads, head_dim, 96, context, tied_head=False)
    generator = torch.Generator().manual_seed(seed)

    def random(name: str) -> torch.Tensor:
        shape = expected_shape(config, name)
        if len(shape) == 1:
            return torch.ones(shape)
        scale = sharpness * 0.15 if name == "head" else 1.2 * shape[1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

    weights = {"model.embed_tokens.weight": random("embed"), "model.norm.weight": random("norm")}
    weights["lm_head.weight"] = random("head")
    for layer in range(layers):
        for ours, theirs in _HF_NAMES.items():
            weights[f"model.layers.{layer}.{theirs}"] = random(f"layers.{layer}.{ours}")
    folder = Path(tempfile.mkdtemp(dir=_FOLDER))
    save_file(weights, folder / "model.safetensors")
    settings = {
        "architectures": ["MistralForCausalLM" if sliding_window else "LlamaForCausalLM"],
        "model_type": "mistral" if sliding_window else "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 96,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **({"sliding_window": sliding_window} if sliding_window else {}),
        **({"eos_token_id": eos} if eos is not None else {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    if characters:
        _character_tokenizer().save(str(folder / "tokenizer.json"))
        template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def _character_tokenizer() -> tokenizers.Tokenizer:
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<a>": 95, "<b>": 96}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<a>", "<b>"])
    return tokenizer


def tiny_llm(
    seed: int = 0,
    vocab_size: int = 97,
    speculate: str | Mapping[str, Any] | None = None,
    verifier: str = "match",
    context: int = 512,
    sliding_window: int | None = None,
    characters: bool = False,
    eos: int | None = None,
    **kwargs: Any,
) -> LLM:
    """An LLM over random weights, without tokenizer. A draft `model` of "tiny:SEED" is a random one of its kind."""
    return LLM(
        tiny_directory(
            seed, vocab_size, context=context, sliding_window=sliding_window, characters=characters, eos=eos
        ),
        speculate=tiny_draft(speculate, vocab_size),
        verifier=verifier,
        **kwargs,
    )


def plain_answers(prompts: Any, how: SamplingParams | list[SamplingParams], **options: Any) -> list[Output]:
    """What `tiny_llm(**options)` answers plainly, step by step. Asked once for all tests: not to be written to."""
    key = repr((prompts, how, sorted(options.items())))
    if key not in _PLAIN:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "captures", _CAPTURES)
            _PLAIN[key] = tiny_llm(**options).generate(prompts, how)
    return _PLAIN[key]


def tiny_draft(speculate: Any, vocab_size: int = 97) -> Any:
    """Replace "tiny:SEED", "speaker:KIND" (models) and "head:METHOD,SETTING=N" (untrained heads) by directories."""
    if isinstance(speculate, Mapping):
        return {name: tiny_draft(value, vocab_size) for name, value in speculate.items()}
    if isinstance(speculate, list):
        return [tiny_draft(value, vocab_size) for value in speculate]
    if isinstance(speculate, str) and speculate.startswith("tiny:"):
        return str(tiny_directory(int(speculate.removeprefix("tiny:")), vocab_size))
    if isinstance(speculate, str) and speculate.startswith("head:"):
        from tests.heads import random_head

        method, *settings = speculate.removeprefix("head:").split(",")
        pairs = (setting.split("=") for setting in settings)
        return str(random_head(method, **{name: int(number) for name, number in pairs}))
    if isinstance(speculate, str) and speculate.startswith("speaker:"):
        from tests.tongues import speaker

        return str(speaker(speculate.removeprefix("speaker:")))
    return speculate
