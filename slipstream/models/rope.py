"""Rotary position embedding: a table of cosines and sines, and the rotation."""

from __future__ import annotations

import math

import torch

from slipstream.models.config import LinearScaling, Llama3Scaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2], with the model's scaling applied."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**steps)
    scaling = config.rope_scaling
    if config.rope_factors:
        return frequencies / torch.tensor(config.rope_factors)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelength = 2 * math.pi / frequencies
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    slowed = frequencies / scaling.factor
    blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * slowed + blend * frequencies
    result = torch.where(wavelength > longest, slowed, frequencies)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), blended, result)


class RopeTable:
    """Cosines and sines of every position up to the context's end, made in pieces as they are needed."""

    _PIECE = 4096

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._frequencies = inverse_frequencies(config)
        self._device = device
        self._cos = torch.empty(0, config.head_dim)
        self._sin = torch.empty(0, config.head_dim)

    def at(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of `positions`, each [rows, 1, head_dim]; `highest` is the largest of them."""
        if highest >= len(self._cos):
            self._grow(highest + 1)
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _grow(self, size: int) -> None:
        size = -(-size // self._PIECE) * self._PIECE
        angles = torch.outer(torch.arange(size, dtype=torch.float32), self._frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(self._device)
        # The first half is negative so that the rotation is x * cos + swapped x * sin.
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(self._device)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [rows, heads, head_dim] in place. Products and one sum: the same bits in any vector width."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    x.mul_(cos).add_(swapped.mul_(sin))
