"""Rotary position embedding: a table of cosines and sines, and the rotation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from slipstream.gpu.fused import runs_fused
from slipstream.models.config import LinearScaling, Llama3Scaling, ModelConfig


def make_ropes(config: ModelConfig, device: str) -> list[RopeTable]:
    """The rotations that the layers have: one for all, or a second one for the layers with a window."""
    ropes = [RopeTable(config, device)]
    if config.rope_local_theta is not None:
        local = replace(config, rope_theta=config.rope_local_theta, rope_scaling=None, rope_factors=())
        ropes.append(RopeTable(local, device))
    return ropes


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
    """The rotation of every position of the context as complex numbers, extended as needed."""

    _PIECE = 4096

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._frequencies = inverse_frequencies(config)
        self._device = device
        self._turns = torch.empty(0, config.head_dim // 2, dtype=torch.complex64)
        self._pairs = np.empty((0, 2, config.head_dim), np.float32)

    def up_to(self, highest: int) -> torch.Tensor:
        """The rotations of at least all positions up to `highest`, [positions, head_dim / 2]."""
        if highest >= len(self._turns):
            size = -(-(highest + 1) // self._PIECE) * self._PIECE
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self._frequencies)
            self._turns = torch.complex(angles.cos(), angles.sin()).to(self._device)
        return self._turns

    def pairs(self, positions: npt.NDArray[np.int64], highest: int) -> npt.NDArray[np.float32]:
        """The rotations as real factors of a pair (a, b) and of (b, a): [rows, 2, head_dim]."""
        if highest >= len(self._pairs):
            turns = self.up_to(highest)
            cosines, sines = turns.real, turns.imag
            crossed = torch.stack([-sines, sines], 2)
            self._pairs = torch.stack([cosines.repeat_interleave(2, 1), crossed.flatten(1)], 1).numpy()
        return self._pairs.take(positions, 0)


def turns_of_all_heads(turns: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rotations [rows, head size / 2] for q and k of all heads, identity for v: [rows, width of qkv / 2]."""
    none = turns.new_ones(()).expand(len(turns), config.kv_heads * config.head_dim // 2)
    return torch.cat([turns] * (config.heads + config.kv_heads) + [none], 1)


def rotate_(x: torch.Tensor, turns: torch.Tensor) -> None:
    """Rotate x [rows, 2n] in place by turns [rows, n], complex.

    The two dimensions of a pair must be adjacent: see `pairs_adjacent`.
    """
    if runs_fused(x):
        from slipstream.gpu.kernels.fused_kernels import rotate

        rotate(x, turns, x)
    elif x.dtype == torch.float32:
        x.view(torch.complex64).mul_(turns)
    else:
        x.copy_((x.float().view(torch.complex64) * turns).view(torch.float32))


def pairs_adjacent(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the output rows of a q or k matrix (or the weight of its norm) so that rotated pairs are adjacent.

    Checkpoints pair dimension i with i + head_dim / 2. An adjacent pair is one complex number, and the rotation one
    multiplication. Scores do not change, because q and k are reordered alike.
    """
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def pairs_apart(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `pairs_adjacent`."""
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
