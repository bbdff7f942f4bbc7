"""Blocks of 256 weights with inner scales: the K formats, which larger models use.

Products and sums stay separate (no fused multiply-add), so that the result is bitwise the reference's.
"""

from __future__ import annotations

import torch

WEIGHTS = 256


def half_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[n, 144] bytes: two float16, scales and offsets of eight parts, then low halves of bytes before high ones."""
    _with_offsets(blocks, _halves(blocks[:, 16:144], 32), out)


def q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[n, 176] bytes: as `q4_k` with a fifth bit of every weight, one byte for the same index in all eight parts."""
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    _with_offsets(blocks, _halves(blocks[:, 48:176], 32) | (fifth << 4), out)


def q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[n, 210] bytes: four bits of each weight, two more, scales of sixteen parts, and a float16 for all."""
    low = _halves(blocks[:, :128], 64)  # [n, 4, 64]
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> places) & 3  # [n, 2, 4, 32]
    codes = (low.reshape(-1, 16, 16) | (high.reshape(-1, 16, 16) << 4)).view(torch.int8) - 32
    scales = half_at(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    torch.mul(codes, scales[:, :, None], out=out.view(-1, 16, 16))


def _with_offsets(blocks: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """Codes [n, 8, 32] times the scale of their part, less its offset."""
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    # Six bits each: those of the last four parts are split, four bits in `rest` and two above the first parts' six.
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], 1)
    offsets = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], 1)
    parts = out.view(-1, 8, 32)
    torch.mul(codes, (half_at(blocks, 0) * scales)[:, :, None], out=parts)
    parts -= (half_at(blocks, 2) * offsets)[:, :, None]


def _halves(content: torch.Tensor, run: int) -> torch.Tensor:
    """Bytes [n, count] -> [n, 2 * count / run, run]: of each run of bytes all low halves, then all high ones."""
    runs = content.unflatten(1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1, 2)
