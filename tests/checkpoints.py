"""Tiny checkpoints as transformers saves them, and what loading one must give, or say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from slipstream.models.shapes import expected_shape, weight_names

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 16, "head_dim": 16},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises exactly `kind`, with one line that holds every word."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in text
    for word in words:
        assert word in text


def make_model(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **FAMILIES[family], **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def assert_same_weights(checkpoint: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(weight_names(checkpoint.config)) == set(expected)
    for name, weight in expected.items():
        found = checkpoint.weight(name)
        assert found.shape == expected_shape(checkpoint.config, name)
        assert found.is_contiguous()
        assert torch.equal(found, weight), name
    assert checkpoint.config.parameters == sum(weight.numel() for weight in expected.values())
