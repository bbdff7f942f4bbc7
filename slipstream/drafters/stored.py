"""Weights of a trained drafter as a file has them: matrices as whole numbers of 6 or 8 bits with a scale for each row.

Six bits cost the heads that come with the package next to nothing (see docs/training.md), and four codes fit into three
bytes.
"""

from __future__ import annotations

import math

import torch

SCALE = "::scale"  # a matrix stored as whole numbers has its rows' scales under its name and this
SIX = "::six"  # and its codes, where they have 6 bits, under its name and this
FEWEST = 6  # bits of a matrix's numbers
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_OFFSET = 32  # added to codes of 6 bits, which then have no sign


def packed(weights: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Matrices in 6 or 8 bits (always 8 where a row is no multiple of four), everything else as bfloat16."""
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            stored[name] = weight.to(torch.bfloat16)
            continue
        codes, scale = _codes(weight.float(), bits)
        six = _fits_six(weight, bits)
        stored[name + SIX if six else name] = _squeezed(codes) if six else codes.to(torch.int8)
        stored[name + SCALE] = scale[:, 0]
    return stored


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A matrix as a file of so many bits gives it back."""
    codes, scale = _codes(weight, bits)
    return codes * scale


def _fits_six(weight: torch.Tensor, bits: int) -> bool:
    return bits == 6 and weight.shape[1] % 4 == 0


def _codes(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix and their scales [rows, 1]."""
    return _coded(weight, 31, _SHARES) if _fits_six(weight, bits) else _coded(weight, 127, (1.0,))


def _coded(weight: torch.Tensor, levels: int, shares: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from -levels to levels, and scales [rows, 1] that leave the least error, of those that stand for a share of
    a row's largest number: with few codes it may pay to cut off the largest ones.
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
    """Whole numbers from -31 to 31, [rows, columns] -> bytes [rows, 3/4 of the columns]."""
    fours: torch.Tensor = (codes + _OFFSET).to(torch.int32).unflatten(1, (-1, 4))
    joined = (fours << torch.tensor([0, 6, 12, 18])).sum(2, keepdim=True)
    return ((joined >> torch.tensor([0, 8, 16])) & 255).to(torch.uint8).flatten(1)


def _spread(content: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    threes: torch.Tensor = content.to(torch.int32).unflatten(1, (-1, 3))
    joined = (threes << torch.tensor([0, 8, 16])).sum(2, keepdim=True)
    return (((joined >> torch.tensor([0, 6, 12, 18])) & 63) - _OFFSET).flatten(1)
