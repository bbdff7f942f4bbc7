"""Decodes the bytes of a GGUF tensor.

Plain floats keep their dtype. The formats with blocks of 32 weights, which small models use, are decoded here with
torch, and the K formats of 4 to 6 bits in `gguf_super_blocks.py`: several times as fast as the `gguf` package, bitwise
equal, and with nothing to install. Every other format goes through `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.errors import UnsupportedModel
from slipstream.models.formats import gguf_super_blocks as super_blocks
from slipstream.models.formats.gguf_super_blocks import half_at

BLOCK = 32
# Weights decoded at a time: temporaries (a few MB) should stay in the CPU's cache.
CHUNK = 1 << 19

Decoder = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class BlockFormat:
    """How one ggml type stores weights: `weights` of them in `size` bytes."""

    name: str
    weights: int
    size: int
    dtype: torch.dtype | None = None  # of plain floats
    decode: Decoder | None = None  # [n, size] bytes into [n, weights] float32; None: the gguf package does it

    def row_bytes(self, count: int) -> int | None:
        """Bytes of a row of `count` weights; None if the row does not divide into blocks."""
        return None if count % self.weights else count // self.weights * self.size


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 32 single bits at byte `start` of each block, moved to bit 4: [n, 2, 16]."""
    places = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, start : start + 4, None] >> places) & 1
    return bits.view(-1, 2, 16) << 4


def _nibbles(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """16 bytes at `start` as [n, 2, 16]: low halves are weights 0-15, high halves are weights 16-31."""
    packed = blocks[:, start : start + 16]
    return torch.stack((packed & 15, packed >> 4), dim=1)


def _in_halves(out: torch.Tensor) -> torch.Tensor:
    """[n, 32] as [n, 2, 16], as nibbles come."""
    return out.view(-1, 2, BLOCK // 2)


# Products and sums stay separate (no fused multiply-add), so that the result is bitwise the reference's.


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(_nibbles(blocks, 2).view(torch.int8) - 8, half_at(blocks, 0)[:, :, None], out=_in_halves(out))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(_nibbles(blocks, 4), half_at(blocks, 0)[:, :, None], out=_in_halves(out))
    out += half_at(blocks, 2)


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    codes = (_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).view(torch.int8) - 16
    torch.mul(codes, half_at(blocks, 0)[:, :, None], out=_in_halves(out))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(_nibbles(blocks, 8) | _fifth_bits(blocks, 4), half_at(blocks, 0)[:, :, None], out=_in_halves(out))
    out += half_at(blocks, 2)


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), half_at(blocks, 0), out=out)


OWN_FORMATS = {
    0: BlockFormat("F32", 1, 4, torch.float32),
    1: BlockFormat("F16", 1, 2, torch.float16),
    30: BlockFormat("BF16", 1, 2, torch.bfloat16),
    2: BlockFormat("Q4_0", BLOCK, 18, decode=_q4_0),
    3: BlockFormat("Q4_1", BLOCK, 20, decode=_q4_1),
    6: BlockFormat("Q5_0", BLOCK, 22, decode=_q5_0),
    7: BlockFormat("Q5_1", BLOCK, 24, decode=_q5_1),
    8: BlockFormat("Q8_0", BLOCK, 34, decode=_q8_0),
    12: BlockFormat("Q4_K", super_blocks.WEIGHTS, 144, decode=super_blocks.q4_k),
    13: BlockFormat("Q5_K", super_blocks.WEIGHTS, 176, decode=super_blocks.q5_k),
    14: BlockFormat("Q6_K", super_blocks.WEIGHTS, 210, decode=super_blocks.q6_k),
}


def block_format(kind: int, tensor: str) -> BlockFormat:
    """The format with ggml's number `kind`; UnsupportedModel names it if nothing here can decode it."""
    if kind in OWN_FORMATS:
        return OWN_FORMATS[kind]
    constants, quants = _gguf_modules(kind, tensor)
    try:
        known = constants.GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedModel(f"tensor {tensor!r} has the unknown quantisation {kind}") from None
    weights, size = constants.GGML_QUANT_SIZES[known]
    try:
        quants.dequantize(np.zeros((1, size), dtype=np.uint8), known)
    except NotImplementedError:
        raise UnsupportedModel(f"tensor {tensor!r} is stored as {known.name}, which cannot be decoded") from None
    return BlockFormat(known.name, weights, size)


def decode(data: np.ndarray[Any, np.dtype[np.uint8]], form: BlockFormat, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of its own (never a view of the file) from the flat bytes `data`."""
    if form.dtype is not None:
        return torch.from_numpy(data.copy()).view(form.dtype).view(shape)
    if form.decode is None:
        return _decode_by_package(data, form, shape)
    blocks = torch.from_numpy(data).view(-1, form.size)
    out, step = torch.empty(blocks.shape[0], form.weights), CHUNK // form.weights
    for start in range(0, len(blocks), step):
        form.decode(blocks[start : start + step], out[start : start + step])
    return out.view(shape)


def _decode_by_package(
    data: np.ndarray[Any, np.dtype[np.uint8]], form: BlockFormat, shape: tuple[int, ...]
) -> torch.Tensor:
    from gguf import constants, quants

    rows = data.reshape(-1, shape[-1] // form.weights * form.size)
    numbers = quants.dequantize(rows, constants.GGMLQuantizationType[form.name])
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).view(shape)


def _gguf_modules(kind: int, tensor: str) -> tuple[Any, Any]:
    try:
        from gguf import constants, quants
    except ImportError:
        raise UnsupportedModel(
            f"tensor {tensor!r} has quantisation {kind}, which needs the gguf package",
            hint="pip install 'slipstream[gguf]'",
        ) from None
    return constants, quants
