"""A GGUF file as a Checkpoint."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.errors import CorruptFile, ShapeMismatch, UnsupportedModel
from slipstream.models.formats.gguf_blocks import BlockFormat, block_format, decode
from slipstream.models.formats.gguf_config import config_from_gguf
from slipstream.models.formats.gguf_metadata import TensorInfo, read_head
from slipstream.models.mtp import mtp_tensors
from slipstream.models.shapes import expected_shape, weight_names

if TYPE_CHECKING:
    from slipstream.text import Tokenizer

ROPE_FACTORS = "rope_freqs.weight"
LAYERS, MTP_JOINT = "blk.", "nextn.eh_proj.weight"
TABLES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
PARTS = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
}


class GGUFCheckpoint:
    """A GGUF file, opened: everything is checked against the config, nothing is decoded until `weight` is called."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or str(path)
        self._head = read_head(self.path)
        with self.path.open("rb") as file:
            # Copy-on-write, because torch requires writable memory; nothing is written.
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._mapped, np.uint8)
        self.config = config_from_gguf(self._head, self.name, self._rope_factors())
        self.mtp = mtp_tensors(self._head.tensors, LAYERS, MTP_JOINT, self.config.layers)
        self._formats: dict[str, BlockFormat] = {}
        self._places = {name: self._place(name) for name in weight_names(self.config)}
        used = {tensor for tensor, _ in self._places.values()} | {ROPE_FACTORS, *self.mtp}
        if unknown := sorted(self._head.tensors.keys() - used):
            raise UnsupportedModel(f"{self.name} has tensor {unknown[0]!r}, which {self.config.family} does not use")

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata as stored, by full key."""
        return self._head.metadata

    def weight(self, name: str) -> torch.Tensor:
        """One tensor by canonical name: F32, F16 and BF16 as stored, every other format as float32."""
        tensor, expert = self._places[name]
        shape = expected_shape(self.config, name)
        form = self._formats[tensor]
        size = prod(shape) // form.weights * form.size
        start = self._head.tensors[tensor].start + (expert or 0) * size
        weight = decode(self._data[start : start + size], form, shape)
        self._forget(start, size)
        return self._unpermute(name.rsplit(".", 1)[-1], weight)

    def _forget(self, start: int, size: int) -> None:
        """Release the memory of these bytes: they are read only once."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = start - start % mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the metadata; None if the file carries no vocabulary."""
        if not self._head.metadata.get("tokenizer.ggml.tokens"):
            return None
        from slipstream.text import tokenizer_from_gguf

        return tokenizer_from_gguf(self._head.metadata)

    def _rope_factors(self) -> tuple[float, ...]:
        """Llama 3's rope scaling as converters store it: one divisor per frequency."""
        info = self._head.tensors.get(ROPE_FACTORS)
        if info is None:
            return ()
        form, size = self._check_extent(ROPE_FACTORS, info)
        factors = decode(self._data[info.start : info.start + size], form, info.shape)
        values = tuple(factors.float().flatten().tolist())
        return values if any(value != 1.0 for value in values) else ()

    def _place(self, name: str) -> tuple[str, int | None]:
        """Where a canonical weight is: its tensor and, in a stack of experts, its index; checked."""
        tensor, expert = self._locate(name)
        info = self._head.tensors.get(tensor)
        if info is None:
            raise CorruptFile(f"{self.name} lacks tensor {tensor!r}")
        shape = expected_shape(self.config, name)
        wanted = shape if expert is None else (self.config.experts, *shape)
        if info.shape != wanted:
            raise ShapeMismatch(f"tensor {tensor!r} of {self.name} has shape {info.shape}, expected {wanted}")
        if tensor not in self._formats:
            self._formats[tensor], _ = self._check_extent(tensor, info)
        return tensor, expert

    def _locate(self, name: str) -> tuple[str, int | None]:
        if name in TABLES:
            return TABLES[name], None
        _, layer, part = name.split(".", 2)
        if not part.startswith("experts."):
            return f"{LAYERS}{layer}.{PARTS[part]}", None
        _, expert, part = part.split(".")
        # Old converters wrote a tensor per expert, new ones stack them.
        alone, stack = (f"{LAYERS}{layer}.ffn_{part}{tail}.weight" for tail in (f".{expert}", "_exps"))
        return (alone, None) if alone in self._head.tensors else (stack, int(expert))

    def _check_extent(self, tensor: str, info: TensorInfo) -> tuple[BlockFormat, int]:
        """The tensor's format and size in bytes; CorruptFile if the file ends before it."""
        form = block_format(info.kind, tensor)
        row = form.row_bytes(info.shape[-1] if info.shape else 1)
        if row is None:
            raise CorruptFile(f"tensor {tensor!r} of {self.name} has rows that {form.name} cannot store")
        size = row * prod(info.shape[:-1])
        if info.start + size > self._head.size:
            raise CorruptFile(
                f"{self.name} is truncated: tensor {tensor!r} ends at byte {info.start + size} of {self._head.size}"
            )
        return form, size

    def _unpermute(self, part: str, weight: torch.Tensor) -> torch.Tensor:
        """Undo the permutation of rotary halves.

        Files of architecture "llama" store each head's q and k rows as pairs (i, i + half), side by side, because
        their rope rotates neighbours; ours rotates halves. [heads, half, 2, ...] -> [heads, 2, half, ...].
        """
        if part not in ("q", "q_bias", "k", "k_bias") or self._head.metadata["general.architecture"] != "llama":
            return weight
        heads = self.config.heads if part.startswith("q") else self.config.kv_heads
        pairs = weight.view(heads, self.config.head_dim // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)
