"""GEMMs by our own kernels, as calls or as steps of a program."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch.nn import functional

from slipstream.native import kernels
from slipstream.native.call import Call, KernelArgs, Step, address_of
from slipstream.native.compiler import Library
from slipstream.native.kernel_args import FloatGemm, IntGemm, Pack, Unpack
from slipstream.native.shape import DIGIT_LANES, GROUP, SQUARE_ROWS

_ROWS_TO_SHARE = 64  # unpacking fewer is not worth a second thread
WRITTEN, ADDED, GATED = "", "_added", "_gated"  # how results are written; suffixes of kernel names


@dataclass(frozen=True)
class Lines:
    """Rows of float32 in memory: the address of the first one, and the stride in floats."""

    address: int
    stride: int

    @staticmethod
    def of(x: torch.Tensor) -> Lines:
        """A tensor [rows, width]."""
        return Lines(x.data_ptr(), x.stride(0))


@dataclass(frozen=True)
class Space:
    """Buffers for the digits of rows between two steps."""

    digits: torch.Tensor  # int8 [rows * 2 * inputs]
    units: torch.Tensor  # float32 [rows]
    excess: torch.Tensor  # int32 [rows]
    sums: torch.Tensor  # float32 [rows * groups]

    @staticmethod
    def of(rows: int, inputs: int) -> Space:
        """Buffers for `rows` rows."""
        return Space(
            torch.empty(-(-rows // SQUARE_ROWS) * SQUARE_ROWS * 2 * inputs, dtype=torch.int8),
            torch.empty(rows),
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows * -(-inputs // GROUP)),
        )

    def fill(self, args: KernelArgs) -> None:
        """Set the addresses of these buffers in the arguments."""
        args[IntGemm.DIGITS], args[IntGemm.UNITS] = self.digits.data_ptr(), self.units.data_ptr()
        args[IntGemm.EXCESS], args[IntGemm.SUMS] = self.excess.data_ptr(), self.sums.data_ptr()


class Packed(NamedTuple):
    """A weight in a kernel's layout."""

    codes: torch.Tensor  # or the float32 values
    scales: torch.Tensor  # empty without codes
    paired: bool = False  # see `NativeLinear.pair`


@functools.lru_cache(maxsize=64)
def _same(value: float, width: int) -> torch.Tensor:
    """A constant vector, as the default of an argument."""
    return torch.full((width,), value)


def _paired(vectors: torch.Tensor) -> torch.Tensor:
    """Interleave the two halves."""
    halves: torch.Tensor = vectors.unflatten(0, (2, -1))
    return halves.transpose(0, 1).flatten(0, 1)


class NativeLinear(ABC):
    """y = x W^T + b for x [rows, in] by our own kernel."""

    exact = True
    norms = False  # whether the GEMM can norm the rows itself
    _weight: Packed

    def __init__(self, shape: tuple[int, int], bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = shape
        self.panels = -(-self.outputs // self._panel)
        self.width = self.panels * self._panel  # columns of the output, padding included
        fill = self.width - self.outputs
        self._start = _same(0.0, self.width) if bias is None else functional.pad(bias, (0, fill))

    @property
    @abstractmethod
    def _panel(self) -> int:
        """Outputs of a panel."""

    @property
    def can_pair(self) -> bool:
        """Whether `pair` is possible: two halves of whole vectors."""
        return self.outputs % self._panel == 0

    def pair(self) -> None:
        """Interleave gates, the first half of the outputs, and values, the second: a vector of each makes a panel, so
        that `steps` supports `GATED`. The results of a call stay in order.
        """
        if not self._weight.paired:
            start, weight = self._paired_start(), self._paired_weight()
            self.__dict__.pop("_call", None)  # it has the addresses of the present weights
            self._start, self._weight = start, weight  # in one statement, because of interrupts

    def _paired_start(self) -> torch.Tensor:
        return _paired(self._start.view(2 * self.panels, -1)).flatten()

    @abstractmethod
    def _paired_weight(self) -> Packed:
        """The weight after `pair`."""

    @abstractmethod
    def space(self, rows: int) -> Space | None:
        """The buffers that `steps` need."""

    @abstractmethod
    def steps(
        self, rows: int, x: Lines, out: Lines, space: Space | None, *, ending: str = WRITTEN, floor: int = 0
    ) -> list[Step]:
        """The GEMM as steps; `rows` is the address of their number. `ending`: how results are written.

        `floor`: rows are normed first, and this is the address of the addend of their squared length.
        """

    @functools.cached_property
    def _call(self) -> Call:
        return Call(*self.steps(0, Lines(0, 0), Lines(0, self.width), None))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        count = len(x)
        out, space = x.new_empty(count, self.width), self.space(count)
        args, (place,) = self._call.of(count), self._call.arguments
        self._fill(args[place:], x, out, space)
        kernels.float32().run(address_of(args))
        if self._weight.paired:
            return out.view(count, self.panels, 2, -1).transpose(1, 2).flatten(1)
        return out if self.width == self.outputs else out.narrow(1, 0, self.outputs)

    @abstractmethod
    def _fill(self, args: KernelArgs, x: torch.Tensor, out: torch.Tensor, space: Space | None) -> None:
        """Set the inputs and outputs of one call."""


class FloatLinear(NativeLinear):
    """A GEMM with float32 weights. The packed copy is the only copy: the caller may drop the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), bias)
        fill = self.width - self.outputs
        whole = functional.pad(weight, (0, 0, 0, fill)) if fill else weight
        packed = whole.reshape(self.panels, self._panel, self.inputs).transpose(1, 2).contiguous()
        self._weight = Packed(packed, packed.new_empty(0))

    @property
    def _panel(self) -> int:
        return 2 * kernels.here().lanes

    def space(self, rows: int) -> None:
        return None

    def steps(
        self, rows: int, x: Lines, out: Lines, space: Space | None, *, ending: str = WRITTEN, floor: int = 0
    ) -> list[Step]:
        args = np.zeros(FloatGemm.LENGTH, np.int64)
        args[FloatGemm.ROWS], args[FloatGemm.INPUTS], args[FloatGemm.PANELS] = rows, self.inputs, self.panels
        args[FloatGemm.X], args[FloatGemm.X_STRIDE] = x.address, x.stride
        args[FloatGemm.WEIGHT], args[FloatGemm.START] = self._weight.codes.data_ptr(), self._start.data_ptr()
        args[FloatGemm.OUT], args[FloatGemm.OUT_STRIDE] = out.address, out.stride
        return [(kernels.float32()["float32_gemm" + ending], args)]

    def _paired_weight(self) -> Packed:
        vectors = self._weight.codes.view(self.panels, self.inputs, 2, -1).transpose(1, 2).flatten(0, 1)
        packed = _paired(vectors).unflatten(0, (self.panels, 2)).transpose(1, 2).flatten(2)
        return self._weight._replace(codes=packed, paired=True)

    def _fill(self, args: KernelArgs, x: torch.Tensor, out: torch.Tensor, space: Space | None) -> None:
        args[FloatGemm.X], args[FloatGemm.X_STRIDE], args[FloatGemm.OUT] = x.data_ptr(), x.stride(0), out.data_ptr()


class RowQuantizedLinear(NativeLinear):
    """A GEMM that quantises its rows to digits first; `columns` multiply the inputs before that."""

    norms = True
    _cut: str  # the names of the two kernels
    _gemm: str
    _library: Callable[[], Library]  # the library that has both kernels

    def __init__(
        self, shape: tuple[int, int], fineness: float, bias: torch.Tensor | None, columns: torch.Tensor | None
    ) -> None:
        """`fineness`: the factor from a row's largest number to the unit of its digits."""
        super().__init__(shape, bias)
        self._columns = _same(1.0, self.inputs) if columns is None else columns.float().contiguous()
        self._fineness = torch.tensor([fineness])

    @classmethod
    def from_packed(
        cls,
        shape: tuple[int, int],
        fineness: float,
        packed: Packed,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> Self:
        """The GEMM with an already packed weight."""
        product = cls.__new__(cls)
        RowQuantizedLinear.__init__(product, shape, fineness, bias, columns)
        product._weight = packed
        if packed.paired:
            product._start = product._paired_start()
        return product

    @property
    def packed(self) -> Packed:
        """The packed weight, for `from_packed`."""
        return self._weight

    @property
    def _panel(self) -> int:
        return 2 * DIGIT_LANES

    def space(self, rows: int) -> Space:
        return Space.of(rows, self.inputs)

    def steps(
        self, rows: int, x: Lines, out: Lines, space: Space | None, *, ending: str = WRITTEN, floor: int = 0
    ) -> list[Step]:
        args = np.zeros(IntGemm.LENGTH, np.int64)
        args[IntGemm.ROWS], args[IntGemm.INPUTS], args[IntGemm.PANELS] = rows, self.inputs, self.panels
        args[IntGemm.X], args[IntGemm.X_STRIDE], args[IntGemm.FLOOR] = x.address, x.stride, floor
        args[IntGemm.COLUMNS], args[IntGemm.FINENESS] = self._columns.data_ptr(), self._fineness.data_ptr()
        args[IntGemm.WEIGHT], args[IntGemm.SCALES] = self._weight.codes.data_ptr(), self._weight.scales.data_ptr()
        args[IntGemm.OUT], args[IntGemm.OUT_STRIDE] = out.address, out.stride
        args[IntGemm.START] = self._start.data_ptr()
        if space is not None:
            space.fill(args)
        functions = type(self)._library()
        cut, gemm = self._cut + "_normed" * bool(floor), self._gemm + ending
        return [(functions[cut], args), (functions[gemm], args)]

    def _fill(self, args: KernelArgs, x: torch.Tensor, out: torch.Tensor, space: Space | None) -> None:
        assert space is not None
        args[IntGemm.X], args[IntGemm.X_STRIDE], args[IntGemm.OUT] = x.data_ptr(), x.stride(0), out.data_ptr()
        space.fill(args)


class NativeInt8Linear(RowQuantizedLinear):
    """A GEMM with a weight in 8 bits and a scale for each output. The packed copy is the only copy."""

    _cut, _gemm, _library = "cut", "int8_gemm", kernels.int8

    def __init__(
        self,
        weight: torch.Tensor,
        fineness: float,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """`weight`: float32 [out, in]; it is quantised here."""
        super().__init__((weight.shape[0], weight.shape[1]), fineness, bias, columns)
        codes = torch.empty(self.panels, self.inputs // 4, self._panel, 4, dtype=torch.uint8)
        scales = torch.empty(self.width)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        packing = Call((kernels.int8()["pack"], np.zeros(Pack.LENGTH, np.int64)))
        args, (place,) = packing.of(self.outputs), packing.arguments
        facts = weight.data_ptr(), weight.stride(0), self.inputs, codes.data_ptr(), scales.data_ptr()
        args[place + Pack.X : place + Pack.LENGTH] = facts
        kernels.int8().run(address_of(args))
        self._weight = Packed(codes, scales)

    def _paired_weight(self) -> Packed:
        vectors = self._weight.codes.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
        codes = _paired(vectors).unflatten(0, (self.panels, 2)).transpose(1, 2).flatten(2, 3)
        return Packed(codes, _paired(self._weight.scales.view(2 * self.panels, -1)).flatten(), paired=True)

    @functools.cached_property
    def _unpack(self) -> Call:
        facts = self.inputs, self._weight.codes.data_ptr(), self._weight.scales.data_ptr()
        return Call((kernels.int8()["unpack"], np.array([0, 0, *facts, 0], np.int64)))

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as an embedding table; it must not be paired."""
        ids = ids.contiguous()
        if ids.numel() and int(ids.numpy().view(np.uint64).max()) >= self.outputs:  # negative ones, too
            raise IndexError(f"ids up to {int(ids.max())} of a matrix with {self.outputs} rows")
        out = torch.empty(*ids.shape, self.inputs)
        args, (place,) = self._unpack.of(ids.numel()), self._unpack.arguments
        args[place + Unpack.IDS], args[place + Unpack.OUT] = ids.data_ptr(), out.data_ptr()
        kernels.int8().run(address_of(args), alone=ids.numel() < _ROWS_TO_SHARE)
        return out


class NativeInt4Linear(RowQuantizedLinear):
    """A GEMM with 4-bit weights: codes [out, in], and scale and offset of each group of inputs."""

    _cut, _gemm, _library = "cut_groups", "int4_gemm", kernels.int4

    def __init__(
        self,
        codes: torch.Tensor,
        grids: torch.Tensor,
        fineness: float,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """`codes`: 0 to 15, [out, in]; `grids`: bfloat16 [out, groups, scale and offset]."""
        super().__init__((codes.shape[0], codes.shape[1]), fineness, bias, columns)
        fill, groups = self.width - self.outputs, self.inputs // GROUP
        whole = functional.pad(codes.to(torch.uint8), (0, 0, 0, fill))
        # [panels, vectors, lanes, groups, halves, fours, 4] -> two times [panels, groups, vectors, fours, lanes, 4]
        parts = whole.view(self.panels, 2, DIGIT_LANES, groups, 2, GROUP // 8, 4)
        low, high = parts.permute(4, 0, 3, 1, 5, 2, 6)
        lines = functional.pad(grids, (0, 0, 0, 0, 0, fill)).view(self.panels, self._panel, groups, 2)
        self._weight = Packed((low | (high << 4)).contiguous(), lines.permute(0, 2, 3, 1).contiguous())

    def _paired_weight(self) -> Packed:
        vectors = self._weight.codes.transpose(1, 2).flatten(0, 1)
        codes = _paired(vectors).unflatten(0, (self.panels, 2)).transpose(1, 2).contiguous()
        grids = self._weight.scales.unflatten(3, (2, -1)).movedim(3, 1).flatten(0, 1)
        scales = _paired(grids).unflatten(0, (self.panels, 2)).movedim(1, 3).flatten(3)
        return Packed(codes, scales, paired=True)
