"""8-bit and 4-bit weights on a CPU, and batch-invariant GEMMs with them.

* `Int8Linear`: 8-bit weights. A row of activations is scaled by its own largest number and split into two digits, so
that integers are multiplied and added. Integer sums do not round, so the GEMM is batch-invariant in any order, and
the faster of two kernels may be used. * `Int4Linear`: 4-bit weights in groups with a scale and an offset each, and
activations in bfloat16.

The weight of a norm before a GEMM is kept separately (`columns`) and not folded into the matrix: activations that
include it have smaller outliers, and the matrix without it stays on the grid of a quantised file.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import INT8_INPUTS, Linear, int8_kernels_work
from slipstream.models.shapes import is_matrix, weight_shapes

if TYPE_CHECKING:
    from slipstream.native.linear import NativeInt4Linear, NativeInt8Linear, Packed

MODES = ("none", "int8", "int4")

_BASE = 128  # of the two digits of an activation, which are in -64..64: with 8 bits, pairs overflow on some CPUs
_MOST = 63 * _BASE + 63  # the largest activation in two digits
_SUM = 2**31 - 1  # the largest sum
_FEW = 32  # rows up to which W x^T is faster than x W^T
_OUTPUTS = 16_384  # outputs computed at a time, so that the sums stay in the CPU's cache
_GROUP = 32  # 4-bit weights that share a scale and an offset; also the group of most 4-bit files
_LANES = 16  # outputs that the 4-bit kernel computes together
_BLOCK = 4096  # rows that are quantised at a time, so that temporaries stay small
_TINY = 1e-30  # replaces a largest number of 0


class Int8Matrix:
    """A matrix [out, in] in 8 bits with one scale per row. Indexing by ids gives rows, as in an embedding table."""

    def __init__(self, weight: torch.Tensor) -> None:
        levels = int8_levels()
        self.codes = torch.empty(weight.shape, dtype=torch.int8)
        self.scales = torch.empty(len(weight))  # [out]
        for start in range(0, len(weight), _BLOCK):
            rows, some = weight[start : start + _BLOCK], slice(start, start + _BLOCK)
            self.scales[some] = rows.abs().amax(1).clamp_min_(_TINY).div_(levels)
            self.codes[some] = (rows / self.scales[some, None]).round_()

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.codes[ids] * self.scales[ids].unsqueeze(-1)

    @classmethod
    def from_packed(cls, packed: Packed) -> Int8Matrix:
        """From packed parts that were made before."""
        matrix = cls.__new__(cls)
        matrix.codes, matrix.scales = packed.codes, packed.scales
        return matrix


class Int8Linear:
    """The GEMM with an `Int8Matrix`. A row with NaN or infinity affects no other."""

    exact = True

    def __init__(
        self, matrix: Int8Matrix, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> None:
        self.matrix = matrix
        self._out, width = matrix.codes.shape
        starts = range(0, self._out, _OUTPUTS)
        self._pieces = [(s, matrix.codes[s : s + _OUTPUTS], matrix.scales[s : s + _OUTPUTS]) for s in starts]
        self._bias = bias
        self._columns = columns
        self._fineness = fineness(width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if self._columns is not None:
            x = x * self._columns
        unit = x.abs().amax(1, keepdim=True).clamp_min_(_TINY).mul_(self._fineness)
        scaled = x / unit
        high = (scaled * (1 / _BASE)).round_()
        digits = torch.cat([high, scaled.sub_(high, alpha=_BASE)]).to(torch.int8)  # [2 * rows, in]
        result = x.new_empty(rows, self._out)
        for start, codes, scales in self._pieces:
            flat = rows <= _FEW
            sums = torch._int_mm(codes, digits.t()).t() if flat else torch._int_mm(digits, codes.t())
            whole = torch.add(sums[rows:], sums[:rows], alpha=_BASE)  # int32 [rows, outputs]
            torch.mul(whole, scales, out=result.narrow(1, start, len(codes)))
        result.mul_(unit)
        return result if self._bias is None else result.add_(self._bias)


class Int4Linear:
    """A GEMM with 4-bit weights, (code - 8) * scale + offset, by a kernel that sums a row in a fixed order."""

    exact = True

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> None:
        self._out, width = weight.shape
        self._fill = -width % _GROUP
        whole = functional.pad(weight, (0, self._fill, 0, -self._out % _LANES))
        parts = [_four_bits(rows) for rows in whole.split(_BLOCK)]
        self._packed = torch.cat([packed for packed, _ in parts])  # uint8 [out, in / 2]
        self._grids = torch.cat([grids for _, grids in parts], 1)  # bfloat16 [groups, out, scale and offset]
        self._bias = bias
        self._columns = columns
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._columns is not None:
            x = x * self._columns
        if self._fill:
            x = functional.pad(x, (0, self._fill))
        sums: torch.Tensor = self._run(x.to(torch.bfloat16), self._packed, _GROUP, self._grids)
        result = sums[:, : self._out].float()
        return result if self._bias is None else result.add_(self._bias)


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and grids of some rows, in the library kernel's layout."""
    codes, scale, offset = _on_grids(weight)
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return packed, torch.cat([scale, offset], 2).transpose(0, 1).to(torch.bfloat16)


def _on_grids(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, in], scales and offsets [rows, groups, 1] that bfloat16 can hold.

    A group that is on a grid of 16 values with both ends used keeps it.
    """
    groups = weight.unflatten(1, (-1, _GROUP))
    least, largest = groups.aminmax(dim=2, keepdim=True)
    scale = ((largest - least) / 15).clamp_min_(_TINY).bfloat16().float()
    offset = (least + 8 * scale).bfloat16().float()
    codes = ((groups - offset) / scale + 8).round_().clamp_(0, 15).to(torch.uint8)
    return codes.flatten(1), scale, offset


QuantizedLinear: TypeAlias = "Int8Linear | Int4Linear | NativeInt8Linear | NativeInt4Linear"


def quantized_linear(
    mode: str, weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> QuantizedLinear:
    """The GEMM of a layer in int8 or int4; `columns` [in] multiply the activations first."""
    return (int4_linear if mode == "int4" else int8_linear)(weight, bias, columns)


def linear_from_packed(
    mode: str, shape: tuple[int, ...], packed: Packed, bias: torch.Tensor | None, columns: torch.Tensor | None
) -> NativeInt8Linear | NativeInt4Linear:
    """The GEMM of a layer in int8 or int4, from packed parts."""
    from slipstream.native.linear import NativeInt4Linear, NativeInt8Linear

    outputs, inputs = shape
    kind = NativeInt4Linear if mode == "int4" else NativeInt8Linear
    return kind.from_packed((outputs, inputs), fineness(inputs), packed, bias, columns)


def packed_of(made: Linear | Int8Matrix) -> Packed | None:
    """The packed parts from which a GEMM can be rebuilt; None if only another library's kernels can read them."""
    from slipstream.native.linear import Packed, RowQuantizedLinear

    if isinstance(made, RowQuantizedLinear):
        return made.packed
    return Packed(made.codes, made.scales) if isinstance(made, Int8Matrix) else None


def int8_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> Int8Linear | NativeInt8Linear:
    """The GEMM with a weight in 8 bits: by our own kernel, if the CPU has the instruction for it."""
    if not int8_kernels_work() or weight.shape[1] % INT8_INPUTS:
        return Int8Linear(Int8Matrix(weight), bias, columns)
    from slipstream.native.linear import NativeInt8Linear

    return NativeInt8Linear(weight.float(), fineness(weight.shape[1]), bias, columns)


def int4_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> Int4Linear | NativeInt4Linear:
    """The GEMM with a weight in 4 bits: by our own kernel, if the CPU has the instruction for it."""
    width = weight.shape[1]
    if not int8_kernels_work() or width % _GROUP:
        return Int4Linear(weight, bias, columns)
    from slipstream.native.linear import NativeInt4Linear

    codes, scales, offsets = zip(*(_on_grids(rows) for rows in weight.split(_BLOCK)), strict=True)
    grids = torch.cat([torch.cat(scales), torch.cat(offsets)], 2).bfloat16()
    return NativeInt4Linear(torch.cat(codes), grids, fineness(width), bias, columns)


def fineness(width: int) -> float:
    """The factor from a row's largest number to the unit of its digits: no sum of them can overflow."""
    return 1.0 / min(_MOST, _SUM // (127 * width) - _BASE // 2 - 1)


@functools.cache
def int8_levels() -> int:
    """The largest code of a weight whose products are summed correctly here; 0: none.

    CPUs without 8-bit dot products multiply and add in pairs, in 16 bits, and saturate.
    """
    return next((levels for levels in (127, 63) if _sums_are_correct(levels)), 0)


def _sums_are_correct(levels: int) -> bool:
    outer, inner = 96, 64
    for weight in (levels, -levels):
        codes = torch.full((outer, inner), weight, dtype=torch.int8)
        for digit in (_BASE // 2, -_BASE // 2):
            for rows in (2, 4, 2 * _FEW, 2 * _FEW + 2):
                digits = torch.full((rows, inner), digit, dtype=torch.int8)
                sums = torch._int_mm(codes, digits.t()), torch._int_mm(digits, codes.t())
                if any(bool((sum_ != weight * digit * inner).any()) for sum_ in sums):
                    return False
    return True


def quantized_bytes(config: ModelConfig, mode: str) -> int:
    """Memory of the weights in a mode other than none. A tied head is the embedding table itself."""
    return sum(_bytes(name, shape, mode) for name, shape in weight_shapes(config).items())


def _bytes(name: str, shape: tuple[int, ...], mode: str) -> int:
    if not is_matrix(name, shape):
        return prod(shape) * 4
    outer, inner = shape
    if mode == "int8" or name in ("embed", "head"):
        return outer * inner + outer * 4
    outer, inner = outer - outer % -_LANES, inner - inner % -_GROUP
    return outer * inner // 2 + outer * inner // _GROUP * 4
