"""Quantized weights of a trained drafter: matrices as integers of 6 or 8 bits with a scale per row.

Six bits cost the heads of the package next to nothing (see docs/training.md), and four codes fit into three bytes. If a
few numbers are much larger than the rest of their row (a matrix that started as an identity keeps its diagonal), six
bits would leave little of the rest: such a matrix has eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

SCALE = "::scale"  # suffix of the name of a quantized matrix's row scales
SIX = "::six"  # suffix of the name of its codes, if they have 6 bits
FEWEST = 6  # bits of a matrix's numbers
# The largest code, and the fractions of a row's largest number that it may represent.
_OF_SIX, _OF_EIGHT = (31, (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)), (127, (1.0,))
_FAR = 0.08  # largest RMS error of six bits, relative to a matrix's mean size (0.04 for noise)
_OFFSET = 32  # added to codes of 6 bits, which then have no sign


def packed(weights: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Matrices in 6 or 8 bits (8 also if a row is no multiple of four, or 6 are too few), the rest as bfloat16."""
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            stored[name] = weight.to(torch.bfloat16)
            continue
        codes, scale, six = _codes(weight.float(), bits)
        stored[name + SIX if six else name] = _squeezed(codes) if six else codes.to(torch.int8)
        stored[name + SCALE] = scale[:, 0]
    return stored


def rounded(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Matrices of one width as a file of the fewest bits restores them. The host waits for nothing."""
    rows, sizes = torch.cat(list(matrices)), [len(matrix) for matrix in matrices]
    eight = _given_back(rows, *_OF_EIGHT)
    if rows.shape[1] % 4:
        return list(eight.split(sizes))
    six = _given_back(rows, *_OF_SIX)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(rows.device, non_blocking=True)
    parts = ((six - rows).square().mean(1), rows.abs().mean(1))
    wrong, large = (rows.new_zeros(len(sizes)).index_add(0, owner, part) for part in parts)
    count = torch.tensor(sizes).to(rows.device, non_blocking=True)
    near = _near(wrong / count, large / count)[owner]
    return list(torch.where(near[:, None], six, eight).split(sizes))


def _codes(matrix: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Codes of a matrix, their scales [rows, 1], and whether they have six bits."""
    if bits == FEWEST and matrix.shape[1] % 4 == 0:
        codes, scale = _coded(matrix, *_OF_SIX)
        if _near((codes * scale - matrix).square().mean(), matrix.abs().mean()):
            return codes, scale, True
    return *_coded(matrix, *_OF_EIGHT), False


def _near(wrong: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Whether six bits are enough, by the mean square of the error and the mean size of the numbers."""
    return wrong <= (_FAR * large).square()


def _given_back(rows: torch.Tensor, levels: int, shares: tuple[float, ...]) -> torch.Tensor:
    codes, scale = _coded(rows, levels, shares)
    return codes * scale


def _coded(weight: torch.Tensor, levels: int, shares: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from -levels to levels, and the scales [rows, 1] of least error among those that represent a fraction of a
    row's largest number: with few codes it may pay to clip the largest ones.
    """
    largest = weight.abs().amax(1, keepdim=True).clamp_min(1e-12)
    codes, scale, least = torch.zeros_like(weight), torch.zeros_like(largest), torch.full_like(largest, math.inf)
    for share in shares:
        step = largest * share / levels
        choice = (weight / step).round_().clamp_(-levels, levels)
        error = (choice * step).sub_(weight).square_().sum(1, keepdim=True)
        better = error < least
        codes = torch.where(better, choice, codes)
        scale, least = torch.where(better, step, scale), torch.where(better, error, least)
    return codes, scale


def unpacked(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights in float32."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in stored.items():
        if name.endswith(SCALE):
            continue
        if name.endswith(SIX):
            name, weight = name.removesuffix(SIX), _spread(weight)
        scale = stored.get(name + SCALE)
        weights[name] = weight.float() if scale is None else weight.float() * scale[:, None]
    return weights


def _squeezed(codes: torch.Tensor) -> torch.Tensor:
    """Integers from -31 to 31, [rows, columns] -> bytes [rows, 3/4 of the columns]."""
    fours: torch.Tensor = (codes + _OFFSET).to(torch.int32).unflatten(1, (-1, 4))
    joined = (fours << torch.tensor([0, 6, 12, 18])).sum(2, keepdim=True)
    return ((joined >> torch.tensor([0, 8, 16])) & 255).to(torch.uint8).flatten(1)


def _spread(content: torch.Tensor) -> torch.Tensor:
    """Inverse of `_squeezed`."""
    threes: torch.Tensor = content.to(torch.int32).unflatten(1, (-1, 3))
    joined = (threes << torch.tensor([0, 8, 16])).sum(2, keepdim=True)
    return (((joined >> torch.tensor([0, 6, 12, 18])) & 63) - _OFFSET).flatten(1)
