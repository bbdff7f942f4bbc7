"""RMS norms whose weights are folded into what follows, and those that have nothing to be folded into."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from slipstream.attention.even import LANES
from slipstream.fused import runs_fused
from slipstream.models.config import ModelConfig
from slipstream.models.linear import native_works
from slipstream.passing import normed


class UnitNorm:
    """A norm without its weight and without the square root of the width: both are folded into the matrix behind it.

    sqrt(mean(x^2) + eps) is, up to that root, the hypotenuse of the length of x and a constant: one operation.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self._length = (config.norm_eps * config.hidden_size) ** 0.5
        self._eps = torch.tensor(self._length, device=device)
        self._dtype = dtype
        self.late = (self._length**2, 1.0)  # floor and factor of a norm that is applied behind a product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if runs_fused(x):
            from slipstream.fused_kernels import unit_norm

            return unit_norm(x, self._length, self._dtype)
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scaled = x / length.hypot_(self._eps)
        return scaled if scaled.dtype == self._dtype else scaled.to(self._dtype)

    def stream(self, x: torch.Tensor) -> Stream:
        """Rows that layers will add to, ready to be normed again and again."""
        on_cpu = x.device.type == "cpu" and x.dtype == self._dtype == torch.float32
        return _LongStream(x, self._length) if on_cpu else Stream(x, self)


class Stream:
    """The rows of a pass between the layers: they are added to, and read through a norm."""

    def __init__(self, x: torch.Tensor, norm: UnitNorm) -> None:
        self.rows = x  # [rows, width]
        self._norm = norm

    def normed(self) -> torch.Tensor:
        """The rows under the norm, [rows, width]."""
        return self._norm(self.rows)

    def end(self) -> None:
        """Have the rows back where they came from."""


class _LongStream(Stream):
    """Rows that have the constant of the norm as one more number: what divides them is then the length of all that.

    An operation less for every norm, and on a CPU a small operation costs as much as its call.
    """

    def __init__(self, x: torch.Tensor, length: float) -> None:
        width = x.shape[1]
        self._origin = x
        self._long = functional.pad(x, (0, LANES))  # whole vectors, of which one number is used
        self._long[:, width] = length
        self.rows = self._long.narrow(1, 0, width)

    def normed(self) -> torch.Tensor:
        length: torch.Tensor = torch.linalg.vector_norm(self._long, dim=-1, keepdim=True)
        return self.rows / length

    def end(self) -> None:
        self._origin.copy_(self.rows)


class PostNorm:
    """A part of a layer, [rows, in] -> [rows, width], and the norm that its result passes before it is added."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor], norm: UnitNorm, weight: torch.Tensor) -> None:
        self._part = part
        self._norm = norm
        self._weight = weight  # [width], with the square root of the width in it

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(self._part(x)).mul_(self._weight)


class RowNorms:
    """RMS norms of one or two kinds of rows, side by side, for drafts: in one call wherever that can be had."""

    def __init__(self, *weights: torch.Tensor, eps: float) -> None:
        self._weights = weights
        self._eps = eps
        here = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        self._native = None
        if here and native_works() and all(len(weight) % LANES == 0 for weight in weights):
            from slipstream.native.small import RootMean

            self._native = RootMean(weights, eps)

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        """Rows [rows, width] of each kind -> [rows, all widths]."""
        if self._native is not None:
            return self._native(*parts)
        return normed(parts, self._weights, self._eps)
