"""RMS norms whose weights are folded into the next matrix, and those that cannot be folded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from slipstream.attention.even import LANES
from slipstream.gpu.fused import runs_fused
from slipstream.gpu.layer_ops import normed
from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import native_works


class UnitNorm:
    """A norm without its weight and without the square root of the width: both are folded into the matrix after it.

    sqrt(mean(x^2) + eps) is, up to that root, the hypotenuse of the length of x and a constant: one operation.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self._length = (config.norm_eps * config.hidden_size) ** 0.5
        self._eps = torch.tensor(self._length, device=device)
        self._dtype = dtype
        self.deferred = (self._length**2, 1.0)  # floor and factor of a norm that is applied after a GEMM

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if runs_fused(x):
            from slipstream.gpu.kernels.fused_kernels import unit_norm

            return unit_norm(x, self._length, self._dtype)
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scaled = x / length.hypot_(self._eps)
        return scaled if scaled.dtype == self._dtype else scaled.to(self._dtype)

    def stream(self, x: torch.Tensor) -> Stream:
        """Rows that layers add to, prepared for repeated norms."""
        on_cpu = x.device.type == "cpu" and x.dtype == self._dtype == torch.float32
        return _LongStream(x, self._length) if on_cpu else Stream(x, self)


class Stream:
    """The residual stream of a pass: layers add to it and read it through a norm."""

    def __init__(self, x: torch.Tensor, norm: UnitNorm) -> None:
        self.rows = x  # [rows, width]
        self._norm = norm

    def normed(self) -> torch.Tensor:
        """The normalised rows, [rows, width]."""
        return self._norm(self.rows)

    def end(self) -> None:
        """Copy the rows back."""


class _LongStream(Stream):
    """Rows with the constant of the norm as one more element: the divisor is then the length of the extended row.

    That saves one operation per norm, and on a CPU a small operation costs as much as its call.
    """

    def __init__(self, x: torch.Tensor, length: float) -> None:
        width = x.shape[1]
        self._origin = x
        self._long = functional.pad(x, (0, LANES))  # whole vectors, of which one element is used
        self._long[:, width] = length
        self.rows = self._long.narrow(1, 0, width)

    def normed(self) -> torch.Tensor:
        length: torch.Tensor = torch.linalg.vector_norm(self._long, dim=-1, keepdim=True)
        return self.rows / length

    def end(self) -> None:
        self._origin.copy_(self.rows)


class PostNorm:
    """A part of a layer, [rows, in] -> [rows, width], and the norm of its output."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor], norm: UnitNorm, weight: torch.Tensor) -> None:
        self._part = part
        self._norm = norm
        self._weight = weight  # [width], including the square root of the width

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(self._part(x)).mul_(self._weight)


class RowNorms:
    """RMS norms of one or two kinds of rows, side by side, for drafts: in one kernel if possible."""

    def __init__(self, *weights: torch.Tensor, eps: float) -> None:
        self._weights = weights
        self._eps = eps
        here = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        self._native = None
        if here and native_works() and all(len(weight) % LANES == 0 for weight in weights):
            from slipstream.native.small import RMSNorms

            self._native = RMSNorms(weights, eps)

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        """Rows [rows, width] of each kind -> [rows, all widths]."""
        if self._native is not None:
            return self._native(*parts)
        return normed(parts, self._weights, self._eps)
