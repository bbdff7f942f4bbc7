"""Batch-invariant GEMMs on a CPU: a row's result does not depend on the other rows.

`F.linear` picks its kernel by the number of rows, and the kernels round differently, so a token's logits would depend
on how many tokens share its pass. Two forms are batch-invariant:

* `PackedLinear`: MKL with the weights packed once. Also much faster than `F.linear` for 2 to 64 rows.
* `TiledLinear`: `F.linear` in tiles of a fixed number of rows, for CPUs without MKL, or on which MKL is not invariant.

Elsewhere (CUDA, 16-bit on a CPU) `PlainLinear` is used, and the model reports that it is not exact. For GPUs there is
`exact_linear.py`.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from slipstream.gpu import gemm
from slipstream.gpu.layer_ops import DeferredNorm, deferred_gate

_PACK_ROWS = 64  # the weights are packed for this many rows, and used for any number
_TILE_ROWS = 8
_LEAST_DRAFT_WEIGHT = 1 << 18  # elements of a weight
NATIVE_INPUTS, INT8_INPUTS = 4, 16  # our own kernels need multiples of these
_NARROW = 256  # outputs up to which one row may use a matrix-vector kernel (seen up to 128) and is therefore doubled


class Linear(Protocol):
    """y = x W^T + b for x [rows, in]."""

    exact: bool  # a row's result does not depend on the other rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        ...


def add_product(total: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """total += part(x), fused if the part supports it."""
    if isinstance(part, AddingLinear):
        part.onto_(total, x)
    else:
        total.add_(part(x))


class MakeLinear(Protocol):
    """How a model makes its GEMMs."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> Linear:
        """The GEMM with a weight [out, in]; `columns` [in] multiply the activations first."""
        ...


class AddingLinear(ABC):
    """A GEMM with an unpacked weight that can add to its output."""

    exact: bool

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def biased(self) -> bool:
        """Whether there is a bias."""
        return self._bias is not None

    def gates(self, deferred: DeferredNorm) -> torch.Tensor:
        """silu of the first half of each row's product times the second half, after the deferred norm of the row."""
        return deferred_gate(self(deferred.rows), deferred)

    @abstractmethod
    def onto(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [rows, out] plus the output, fused."""

    @abstractmethod
    def onto_(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the output to total [rows, out] in place."""


class PlainLinear(AddingLinear):
    """The library's kernel, or one of ours if it is known to be faster."""

    exact = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def onto(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(total if self._bias is None else total + self._bias, x, self._weight.T)

    def gates(self, deferred: DeferredNorm) -> torch.Tensor:
        if self._bias is None and gemm.pays(deferred.rows, self._weight):
            return gemm.gates(deferred.rows, self._weight, deferred.floor, deferred.factor)
        return super().gates(deferred)

    def onto_(self, total: torch.Tensor, x: torch.Tensor) -> None:
        if gemm.pays(x, self._weight) and total.is_contiguous():
            gemm.onto_(total, x, self._weight)
        else:
            total.addmm_(x, self._weight.T)
        if self._bias is not None:
            total += self._bias


class TiledLinear:
    """`F.linear` over a fixed number of rows at a time, the last tile padded with zeros."""

    exact = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        fill = -rows % _TILE_ROWS
        if fill:
            x = functional.pad(x, (0, 0, 0, fill))
        tiles = [functional.linear(tile, self._weight, self._bias) for tile in x.split(_TILE_ROWS)]
        return torch.cat(tiles)[:rows]


class PackedLinear:
    """MKL's packed GEMM. The packed copy is the only copy: the caller may drop the weight it came from."""

    exact = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        # The operator needs the original for its shape alone, so a stride-0 tensor serves; it would read the original's
        # values only if the number of rows were not the announced one.
        self._shape = torch.zeros(1).expand(weight.shape)
        self._bias = bias
        self._run = torch.ops.mkl._mkl_linear.default
        self._narrow = weight.shape[0] <= _NARROW

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 1 and self._narrow:
            return self(x.expand(2, -1).contiguous())[:1]
        result: torch.Tensor = self._run(x, self._packed, self._shape, self._bias, rows)
        return result


class DraftInt8Linear:
    """A GEMM with 8-bit numbers, for drafts: fewer bytes to read, and an error of about 1%.

    The kernel has one scale for all activations of a call, and a row of large numbers would drown the others. So every
    row is divided by its largest number first, and two columns of 1 and -1 (times weights of 0) fix that scale: the
    GEMM is batch-invariant. A row with NaN or infinity affects no other.
    """

    exact = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scales = weight.abs().amax(1).clamp_min(1e-12).double() / 127.0
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the type is deprecated; once it is gone, `draft_int8_works` is False
            rows = torch.quantize_per_channel(functional.pad(weight, (0, 2)), scales, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(rows, None)
        self._run = torch.ops.quantized.linear_dynamic.default
        self._bias = bias
        self._ends = torch.tensor([[1.0, -1.0]])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        scaled = torch.cat([(x / largest).nan_to_num_(0.0), self._ends.expand(len(x), -1)], 1)
        result: torch.Tensor = self._run(scaled, self._packed)
        result.mul_(largest)
        return result if self._bias is None else result.add_(self._bias)


@functools.cache
def draft_int8_works() -> bool:
    """Whether this build has the 8-bit GEMM and it is nearly right, for the largest numbers too: without a CPU
    instruction for it, the library's sums of two products overflow 16 bits.
    """
    own = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=own), torch.randn(3, 64, generator=own)
    weight[0], x[0] = 1.0, 1.0
    try:
        result = DraftInt8Linear(weight, None)(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    wanted = x @ weight.T
    largest = abs(float(result[0, 0] / wanted[0, 0]) - 1.0)
    return largest < 0.05 and float((result - wanted).norm()) < 0.05 * float(wanted.norm())


def make_draft_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest GEMM for a draft, which need not be exact. Small ones are as fast in float32."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _LEAST_DRAFT_WEIGHT:
        return make_linear(weight, bias)
    if int8_kernels_work() and weight.shape[1] % INT8_INPUTS == 0:
        from slipstream.models.layers.quantized import int8_linear

        return int8_linear(weight, bias)
    return DraftInt8Linear(weight, bias) if draft_int8_works() else make_linear(weight, bias)


@functools.cache
def native_works() -> bool:
    """Whether our own kernels are available here and compute the GEMM."""
    from slipstream.native.machine import machine

    if machine() is None:
        return False
    from slipstream.native.linear import FloatLinear

    own = torch.Generator().manual_seed(0)  # the user's random state stays as it is
    weight, x = torch.randn(70, 48, generator=own), torch.randn(11, 48, generator=own)
    try:
        product = FloatLinear(weight)
        result, few = product(x), [product(x[:rows]) for rows in (1, 2, 3)]  # other kernels may compute these
    except RuntimeError:  # a compiler that cannot build our IR
        return False
    same = all(torch.equal(rows, result[: len(rows)]) for rows in few)
    return same and torch.allclose(result, x @ weight.T, atol=1e-4)


def int8_kernels_work() -> bool:
    """Whether there are kernels of our own for 8-bit GEMMs."""
    from slipstream.native.machine import machine

    found = machine()
    return found is not None and found.int8 and native_works()


def short_vectors() -> bool:
    """Whether our own float kernels use vectors of 8 numbers: with half the throughput, more rows cost more."""
    from slipstream.native.machine import machine

    found = machine()
    return found is not None and found.lanes == 8 and native_works()


def has_int8_dot() -> bool:
    """Whether our 8-bit kernels use a dot-product instruction: without it one more row costs three times as much."""
    from slipstream.native.machine import machine

    found = machine()
    return found is not None and found.vnni and int8_kernels_work()


def has_matrix_unit() -> bool:
    """Whether 8-bit GEMMs of several rows use the CPU's matrix unit."""
    from slipstream.native.machine import has_amx

    return int8_kernels_work() and has_amx()


@functools.cache
def packing_works() -> bool:
    """Whether this build has the packed GEMM, and it is batch-invariant: not on every CPU."""
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return False
    own = torch.Generator().manual_seed(0)
    for inputs, outputs in ((32, 48), (64, 97), (576, 320)):
        weight, x = torch.randn(outputs, inputs, generator=own), torch.randn(33, inputs, generator=own)
        try:
            product = PackedLinear(weight, None)
            alone = torch.cat([product(row) for row in x.split(1)])
            together = [(count, product(x[:count])) for count in (2, 3, 5, 8, 16, 33)]
        except (RuntimeError, NotImplementedError):
            return False
        if not torch.allclose(alone, x @ weight.T, atol=1e-3):
            return False
        if not all(torch.equal(rows, alone[:count]) for count, rows in together):
            return False
    return True


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The best GEMM for this weight's device and dtype."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return PlainLinear(weight, bias)
    if native_works() and weight.shape[1] % NATIVE_INPUTS == 0:
        from slipstream.native.linear import FloatLinear

        return FloatLinear(weight, bias)
    return PackedLinear(weight, bias) if packing_works() else TiledLinear(weight, bias)
