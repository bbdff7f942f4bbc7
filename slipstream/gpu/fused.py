# mypy: allow-untyped-calls
"""Fused operations that read and write their rows once on a GPU; elsewhere each is several plain operations.

Those that training needs have gradients. On a GPU a small model spends most of its time moving such rows.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch.nn import functional


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU."""
    return importlib.util.find_spec("triton") is not None


def runs_fused(x: torch.Tensor) -> bool:
    """Whether there are kernels for this tensor's device."""
    return x.is_cuda and has_triton()


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Adjacent pairs of x [batch, length, 2n] times turns [length, n], complex."""
    if runs_fused(x):
        rotated: torch.Tensor = _Rotated.apply(x, turns)
        return rotated
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def gated(both: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row times the second half: [..., 2n] -> [..., n]."""
    if runs_fused(both):
        product: torch.Tensor = _Gated.apply(both)
        return product
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def cross_entropy(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Of rows of logits [rows, tokens] against probabilities that sum to 1 or less, float32 [rows]."""
    if runs_fused(logits):
        losses: torch.Tensor = _CrossEntropy.apply(logits, probabilities)
        return losses
    logarithms = functional.log_softmax(logits, -1, dtype=torch.float32)
    return -(logarithms * probabilities).sum(-1)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        from slipstream.gpu.kernels.fused_kernels import rotate

        ctx.save_for_backward(turns)
        rows = x.flatten(0, 1)
        return rotate(rows, turns, torch.empty_like(rows)).view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        from slipstream.gpu.kernels.fused_kernels import rotate

        (turns,) = ctx.saved_tensors
        rows = slope.contiguous().flatten(0, 1)
        return rotate(rows, turns, torch.empty_like(rows), back=True).view_as(slope), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        from slipstream.gpu.kernels.fused_kernels import gate

        both = both.contiguous()
        ctx.save_for_backward(both)
        return gate(both.flatten(0, -2)).view(*both.shape[:-1], both.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        from slipstream.gpu.kernels.fused_kernels import gate_back

        (both,) = ctx.saved_tensors
        return gate_back(both.flatten(0, -2), slope.contiguous().flatten(0, -2)).view_as(both)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        from slipstream.gpu.kernels.fused_kernels import cross_entropy

        logits, probabilities = logits.contiguous(), probabilities.contiguous()
        losses, facts = cross_entropy(logits, probabilities)
        ctx.save_for_backward(logits, probabilities, facts)
        return losses

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor, None]:
        from slipstream.gpu.kernels.fused_kernels import cross_entropy_back

        logits, probabilities, facts = ctx.saved_tensors
        return cross_entropy_back(logits, probabilities, slopes.float().contiguous(), facts), None
