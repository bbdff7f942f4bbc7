"""Mixtures of experts on disk: every layout gives the same weights, layers may be dense, errors are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import CorruptFile, ShapeMismatch, UnsupportedModel
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.shapes import weight_names
from tests.checkpoints import refused
from tests.models.test_families import build
from tests.models.test_gemma import rewrite


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "qwen3moe-dense", "olmoe"])
def test_stacked_and_separate_experts_are_the_same(name: str, tmp_path: Path) -> None:
    model = build(name, tmp_path / "apart")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    apart, stacked = HFCheckpoint(tmp_path / "apart"), HFCheckpoint(tmp_path / "stacked")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("apart", "stacked")]
    assert [any(".experts.gate_up_proj" in tensor for tensor in file) for file in files] == [False, True]
    assert apart.config == stacked.config
    assert apart.config.parameters == sum(parameter.numel() for parameter in model.parameters())
    for weight in weight_names(apart.config):
        assert torch.equal(apart.weight(weight), stacked.weight(weight)), weight


def test_facts_of_the_families(tmp_path: Path) -> None:
    build("qwen3moe-step", tmp_path / "step")
    config = HFCheckpoint(tmp_path / "step").config
    assert (config.family, config.experts, config.experts_per_token, config.expert_size) == ("qwen3moe", 6, 3, 40)
    assert (config.dense_layers, config.norm_topk, config.intermediate_size) == ((0, 2), False, 112)
    assert [config.mixture(layer) for layer in range(3)] == [False, True, False]
    build("olmoe-clip", tmp_path / "olmoe")
    config = HFCheckpoint(tmp_path / "olmoe").config
    assert (config.qkv_clip, config.qk_norm, config.qk_norm_whole, config.norm_topk) == (0.5, True, True, True)
    assert HFCheckpoint(rewrite(tmp_path / "olmoe", norm_topk_prob=..., clip_qkv=None)).config.norm_topk is False
    build("qwen3moe-window", tmp_path / "window")
    assert HFCheckpoint(tmp_path / "window").config.windows == (40,) * 3
    assert HFCheckpoint(rewrite(tmp_path / "window", use_sliding_window=False)).config.windows == ()


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        (CorruptFile, {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        (CorruptFile, {"mlp_only_layers": 3}, "mlp_only_layers"),
        (CorruptFile, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (CorruptFile, {"num_experts": 10**6}, "num_experts"),
        (CorruptFile, {"mlp_only_layers": [1]}, "model.layers.1.mlp.gate_proj.weight"),
        (ShapeMismatch, {"moe_intermediate_size": 41}, "model.layers.0.mlp.experts.0.gate_proj.weight"),
        (ShapeMismatch, {"num_experts": 5}, "model.layers.0.mlp.gate.weight"),
        (UnsupportedModel, {"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_what_does_not_fit(kind: type[Exception], changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    build("qwen3moe", tmp_path)
    rewrite(tmp_path, num_local_experts=..., num_experts=6)  # as published; transformers 5 saves the other key
    assert HFCheckpoint(tmp_path).config.experts == 6
    with refused(kind, word):
        HFCheckpoint(rewrite(tmp_path, **changes))
