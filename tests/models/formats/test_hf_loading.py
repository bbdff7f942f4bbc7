"""Hugging Face directories: the weights that transformers saved, or one line that says why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CorruptFile, ModelNotFound, ShapeMismatch, UnsupportedModel
from slipstream.models.config import LinearScaling, Llama3Scaling, ModelConfig
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.shapes import weight_names
from tests.checkpoints import FAMILIES, assert_same_weights, make_model, refused

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def reference_weights(model: Any, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Canonical weights taken from the live modules, not from names in a file."""
    weights = {"embed": model.model.embed_tokens.weight, "norm": model.model.norm.weight}
    if not config.tied_head:
        weights["head"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = {"attn_norm": layer.input_layernorm.weight, "mlp_norm": layer.post_attention_layernorm.weight}
        for part in ("q", "k", "v", "o"):
            projection = getattr(attention, f"{part}_proj")
            parts[part] = projection.weight
            if projection.bias is not None:
                parts[f"{part}_bias"] = projection.bias
        if hasattr(attention, "q_norm"):
            parts |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
        if hasattr(mlp, "experts"):
            parts["router"] = mlp.gate.weight
            for expert in range(config.experts):
                gate, up = mlp.experts.gate_up_proj[expert].chunk(2)
                down = mlp.experts.down_proj[expert]
                parts |= {f"experts.{expert}.{n}": w for n, w in (("gate", gate), ("up", up), ("down", down))}
        else:
            parts |= {part: getattr(mlp, f"{part}_proj").weight for part in ("gate", "up", "down")}
        weights |= {f"layers.{index}.{part}": weight for part, weight in parts.items()}
    return weights


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_what_transformers_saved(family: str, sharded: bool, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() is sharded
    checkpoint = open_checkpoint(tmp_path)
    config, theirs = checkpoint.config, model.config
    assert (config.family, config.layers, config.heads, config.kv_heads) == (family.lower(), 2, 4, 2)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.tied_head is (family == "Qwen3")
    assert config.windows == {"Mistral": (16, 16), "Qwen2": (None, 16)}.get(family, ())
    assert (config.experts, config.experts_per_token) == ((4, 2) if family == "Mixtral" else (0, 0))
    assert checkpoint.tokenizer() is None
    assert_same_weights(checkpoint, reference_weights(model, config))


def test_mixtral_as_stacks_and_in_bfloat16(tmp_path: Path) -> None:
    model = make_model("Mixtral").to(torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.weight("embed").dtype == torch.bfloat16
    assert_same_weights(checkpoint, reference_weights(model, checkpoint.config))


@pytest.fixture
def edit(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny Llama with keys of config.json changed (or removed: ...)."""

    def change(**changes: Any) -> Path:
        target = tmp_path / "edited"
        shutil.copytree(llama, target, dirs_exist_ok=True)
        raw = json.loads((target / "config.json").read_text()) | changes
        raw = {key: value for key, value in raw.items() if value is not ...}
        (target / "config.json").write_text(json.dumps(raw))
        return target

    return change


SCALED = Llama3Scaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_parameters": ..., "rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": ...}, 1e4, None),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, LinearScaling(2.0)),
        ({"rope_parameters": ..., "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5}, 5e5, SCALED),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 5e5, SCALED),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 7.0}}, 7.0, LinearScaling(4)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}, "rope_theta": 4.0}, 3.0, None),
    ],
)
def test_rope_of_both_layouts(edit: Callable[..., Path], changes: dict[str, Any], theta: float, scaling: Any) -> None:
    config = HFCheckpoint(edit(**changes)).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_head_dim_and_kv_heads_may_be_absent(edit: Callable[..., Path]) -> None:
    assert HFCheckpoint(edit(head_dim=...)).config.head_dim == 8
    with refused(ShapeMismatch, "self_attn.k_proj.weight", "(16, 32)", "(32, 32)"):
        HFCheckpoint(edit(num_key_value_heads=...))


def test_token_ids_are_united(edit: Callable[..., Path]) -> None:
    path = edit(eos_token_id=[7, 2], bos_token_id=None)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "bos_token_id": 5}))
    config = HFCheckpoint(path).config
    assert (config.eos_ids, config.bos_id) == ((2, 7, 9), 5)
    (path / "generation_config.json").unlink()
    config = HFCheckpoint(path).config
    assert (config.eos_ids, config.bos_id) == ((2, 7), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        *[
            ({"rope_parameters": {"rope_type": kind, "factor": 2.0}}, [kind])
            for kind in ("yarn", "dynamic", "longrope")
        ],
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, ["yarn", "llama3"]),
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM"]),
        ({"architectures": None}, ["architecture None"]),
        ({"architectures": [{}]}, ["architecture {}"]),
        *[
            ({"quantization_config": {"quant_method": method}}, [method])
            for method in ("awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")
        ],
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2}, ["full_attention"]),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["linear_attention"] * 2,
            },
            ["linear_attention"],
        ),
    ],
    ids=str,
)
def test_options_we_do_not_compute_are_refused(
    edit: Callable[..., Path], changes: dict[str, Any], words: list[str]
) -> None:
    path = edit(**changes)
    with refused(UnsupportedModel, str(path), *words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": ...},
        {"hidden_size": "big"},
        {"num_hidden_layers": 10**12},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"vocab_size": 1.5},
        {"rms_norm_eps": -1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": float("nan"), "factor": 2.0}},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense(edit: Callable[..., Path], changes: dict[str, Any]) -> None:
    with refused(CorruptFile, "config.json"):
        open_checkpoint(edit(**changes))


def test_head_is_tied_if_the_config_or_the_file_says_so(edit: Callable[..., Path]) -> None:
    assert HFCheckpoint(edit(tie_word_embeddings=True)).config.tied_head
    path = edit(tie_word_embeddings=False)
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    config = HFCheckpoint(path).config
    assert config.tied_head
    assert "head" not in weight_names(config)
    with pytest.raises(KeyError):
        HFCheckpoint(path).weight("head")


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_tensors_that_do_not_fit(edit: Callable[..., Path]) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    path = edit()
    rewrite(path, lambda tensors: tensors.update({down: torch.zeros(32, 47)}))
    with refused(ShapeMismatch, down, "(32, 47)", "(32, 48)"):
        open_checkpoint(path)
    rewrite(path, lambda tensors: tensors.update({down: torch.zeros(32, 48, dtype=torch.int8)}))
    with refused(UnsupportedModel, down, "I8"):
        open_checkpoint(path)
    rewrite(path, lambda tensors: tensors.pop(down))
    with refused(CorruptFile, "lacks", down):
        open_checkpoint(path)
    path = edit()
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}))
    with refused(UnsupportedModel, "o_proj.bias"):
        open_checkpoint(path)
    path = edit()
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    open_checkpoint(path)


def test_damaged_directories(edit: Callable[..., Path], tmp_path: Path) -> None:
    path = edit()
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (
        b"",
        whole[:5],
        whole[:100],
        whole[:-1],
        b"\xff" * 8 + whole[8:],
        whole[:20] + b"\x00" + whole[21:],
    ):
        weights.write_bytes(damaged)
        with refused(CorruptFile, "model.safetensors"):
            open_checkpoint(path)
    weights.rename(path / "pytorch_model.bin")
    with refused(UnsupportedModel, "pickled", "safetensors"):
        open_checkpoint(path)
    (path / "pytorch_model.bin").unlink()
    with refused(ModelNotFound, "model.safetensors"):
        open_checkpoint(path)
    for garbage in ("{", "[1]", "\x00", '{"a":' * 100_000):
        (path / "config.json").write_text(garbage)
        with refused(CorruptFile, "config.json"):
            open_checkpoint(path)
    (path / "config.json").unlink()
    with refused(ModelNotFound, "no config.json"):
        open_checkpoint(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused(ModelNotFound, "is empty"):
        open_checkpoint(empty)
    with refused(ModelNotFound, "cannot read"):
        HFCheckpoint(empty)


def test_damaged_shards(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    shard = raw["weight_map"]["model.norm.weight"]
    for places, words in [
        ({"model.norm.weight": "../elsewhere.safetensors"}, ["elsewhere"]),
        ({"model.norm.weight": "gone.safetensors"}, ["gone.safetensors"]),
        ({"no.such.tensor": shard}, ["no.such.tensor", shard]),
    ]:
        index.write_text(json.dumps({"weight_map": raw["weight_map"] | places}))
        with refused(CorruptFile, *words):
            open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": 3}))
    with refused(CorruptFile, "weight_map"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps(raw))
    (tmp_path / shard).write_bytes(b"short")
    with refused(CorruptFile, shard):
        open_checkpoint(tmp_path)
