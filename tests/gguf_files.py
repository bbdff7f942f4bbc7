"""Tiny GGUF files, written by the reference package, and what reading one must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.checkpoints import assert_same_weights

Q = gguf.GGMLQuantizationType
WIDTH, MIDDLE, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 32, 4, 2, 64

HALVES = {Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}  # where blocks have float16 numbers


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of a "llama" GGUF: dimension i of a head beside dimension i + half."""
    half = len(weight) // heads // 2
    order = [head * 2 * half + i + part * half for head in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def quantised(weight: np.ndarray, kind: Q) -> np.ndarray:
    if kind in HALVES:  # the package cannot make these; any bytes are one, if the scales of all are sane
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = np.random.default_rng(weight.size).integers(0, 256, (weight.size // 256, size), dtype=np.uint8)
        for place in HALVES[kind]:
            blocks[:, place : place + 2] = np.full(1, 0.01, np.float16).view(np.uint8)
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
