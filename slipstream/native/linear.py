"""Products by our own kernels, alone or as steps of a program."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from slipstream.native import kernels
from slipstream.native.call import Call, Step, Words
from slipstream.native.compiler import Library
from slipstream.native.shape import DIGIT_BASE, DIGIT_LANES, GROUP, SQUARE_ROWS
from slipstream.native.words import Digits, Pack, Product

WRITTEN, ADDED, GATED = "", "_added", "_gated"  # what becomes of results; the names of kernels end so


@dataclass(frozen=True)
class Lines:
    """Rows of float32 in memory: the address of the first one, and floats from one to the next."""

    address: int
    stride: int

    @staticmethod
    def of(x: torch.Tensor) -> Lines:
        """A tensor [rows, width]."""
        return Lines(x.data_ptr(), x.stride(0))


@dataclass(frozen=True)
class Space:
    """Where rows are kept as digits between two steps."""

    digits: torch.Tensor  # int8 [rows * 2 * inputs]
    units: torch.Tensor  # float32 [rows]
    excess: torch.Tensor  # int32 [rows]
    sums: torch.Tensor  # float32 [rows * groups]

    @staticmethod
    def of(rows: int, inputs: int) -> Space:
        """Room for so many rows."""
        return Space(
            torch.empty(-(-rows // SQUARE_ROWS) * SQUARE_ROWS * 2 * inputs, dtype=torch.int8),
            torch.empty(rows),
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows * -(-inputs // GROUP)),
        )

    def fill(self, words: Words) -> None:
        """Say where this is to those who cut rows, and to products with them."""
        words[Digits.DIGITS], words[Digits.UNITS] = self.digits.data_ptr(), self.units.data_ptr()
        words[Digits.EXCESS], words[Digits.SUMS] = self.excess.data_ptr(), self.sums.data_ptr()


@functools.lru_cache(maxsize=64)
def _same(value: float, width: int) -> torch.Tensor:
    """One number over and over, for whoever has nothing of their own there."""
    return torch.full((width,), value)


def _paired(vectors: torch.Tensor) -> torch.Tensor:
    """Of things in a row, the first of each half, then the second, and so on."""
    halves: torch.Tensor = vectors.unflatten(0, (2, -1))
    return halves.transpose(0, 1).flatten(0, 1)


class NativeLinear(ABC):
    """y = x W^T + b for x [rows, in] by our own kernel."""

    exact = True
    norms = False  # whether it can norm the rows itself

    def __init__(self, shape: tuple[int, int], bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = shape
        self.panels = -(-self.outputs // self._panel)
        self.width = self.panels * self._panel  # of what it writes
        fill = self.width - self.outputs
        self._start = _same(0.0, self.width) if bias is None else functional.pad(bias, (0, fill))
        self._paired = False

    @property
    @abstractmethod
    def _panel(self) -> int:
        """Outputs of a panel."""

    @property
    def can_pair(self) -> bool:
        """Whether `pair` can be had: two halves of whole vectors."""
        return self.outputs % self._panel == 0

    def pair(self) -> None:
        """Lay gates, the first half of the outputs, and values, the other one, side by side: a vector of each makes a
        panel, so that `steps` can say `gated`. What a call gives stays in its order.
        """
        if not self._paired:
            self._paired = True
            self._start = _paired(self._start.view(2 * self.panels, -1)).flatten()
            self._pair_weight()
            self.__dict__.pop("_call", None)  # it has the addresses of what lay there before

    @abstractmethod
    def _pair_weight(self) -> None:
        """`pair` the weight."""

    @abstractmethod
    def space(self, rows: int) -> Space | None:
        """What `steps` need for themselves."""

    @abstractmethod
    def steps(
        self, rows: int, x: Lines, out: Lines, space: Space | None, *, ending: str = WRITTEN, floor: int = 0
    ) -> list[Step]:
        """The product as steps; `rows` is the address of their number. `ending`: what becomes of the results.

        `floor`: rows are normed first, and this is the address of what is added to their squared length.
        """

    @functools.cached_property
    def _call(self) -> Call:
        return Call(*self.steps(0, Lines(0, 0), Lines(0, self.width), None))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        count = len(x)
        out, space = x.new_empty(count, self.width), self.space(count)
        words, (place,) = self._call.of(count), self._call.arguments
        self._fill(words[place:], x, out, space)
        kernels.products().run(words.ctypes.data)
        if self._paired:
            return out.view(count, self.panels, 2, -1).transpose(1, 2).flatten(1)
        return out if self.width == self.outputs else out.narrow(1, 0, self.outputs)

    @abstractmethod
    def _fill(self, words: Words, x: torch.Tensor, out: torch.Tensor, space: Space | None) -> None:
        """Say what one call reads and writes."""


class FloatLinear(NativeLinear):
    """A product with float32 weights. The packed copy is the only copy: the caller may drop the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), bias)
        fill = self.width - self.outputs
        whole = functional.pad(weight, (0, 0, 0, fill)) if fill else weight
        self._packed = whole.reshape(self.panels, self._panel, self.inputs).transpose(1, 2).contiguous()

    @property
    def _panel(self) -> int:
        return 2 * kernels.here().lanes

    def space(self, rows: int) -> None:
        return None

    def steps(
        self, rows: int, x: Lines, out: Lines, space: Space | None, *, ending: str = WRITTEN, floor: int = 0
    ) -> list[Step]:
        words = np.zeros(Product.WORDS, np.int64)
        words[Product.ROWS], words[Product.INPUTS], words[Product.PANELS] = rows, self.inputs, self.panels
        words[Product.X], words[Product.X_STRIDE] = x.address, x.stride
        words[Product.WEIGHT], words[Product.START] = self._packed.data_ptr(), self._start.data_ptr()
        words[Product.OUT], words[Product.OUT_STRIDE] = out.address, out.stride
        return [(kernels.products()["product" + ending], words)]

    def _pair_weight(self) -> None:
        vectors = self._packed.view(self.panels, self.inputs, 2, -1).transpose(1, 2).flatten(0, 1)
        self._packed = _paired(vectors).unflatten(0, (self.panels, 2)).transpose(1, 2).flatten(2)

    def _fill(self, words: Words, x: torch.Tensor, out: torch.Tensor, space: Space | None) -> None:
        words[Product.X], words[Product.X_STRIDE], words[Product.OUT] = x.data_ptr(), x.stride(0), out.data_ptr()


class CutLinear(NativeLinear):
    """A product that cuts its rows into digits first; `columns` multiply the inputs before that."""

    norms = True
    _cut: str  # the names of its two kernels
    _product: str
    _library: Callable[[], Library]  # which has them
    _packed: torch.Tensor  # codes
    _scales: torch.Tensor

    def __init__(
        self, shape: tuple[int, int], fineness: float, bias: torch.Tensor | None, columns: torch.Tensor | None
    ) -> None:
        """`fineness`: what a row's largest number is multiplied with to get the unit of its digits."""
        super().__init__(shape, bias)
        self._columns = _same(1.0, self.inputs) if columns is None else columns.float().contiguous()
        self._fineness = torch.tensor([fineness])

    @property
    def _panel(self) -> int:
        return 2 * DIGIT_LANES

    def space(self, rows: int) -> Space:
        return Space.of(rows, self.inputs)

    def steps(
        self, rows: int, x: Lines, out: Lines, space: Space | None, *, ending: str = WRITTEN, floor: int = 0
    ) -> list[Step]:
        words = np.zeros(Digits.WORDS, np.int64)
        words[Digits.ROWS], words[Digits.INPUTS], words[Digits.PANELS] = rows, self.inputs, self.panels
        words[Digits.X], words[Digits.X_STRIDE], words[Digits.FLOOR] = x.address, x.stride, floor
        words[Digits.COLUMNS], words[Digits.FINENESS] = self._columns.data_ptr(), self._fineness.data_ptr()
        words[Digits.WEIGHT], words[Digits.SCALES] = self._packed.data_ptr(), self._scales.data_ptr()
        words[Digits.OUT], words[Digits.OUT_STRIDE] = out.address, out.stride
        words[Digits.START] = self._start.data_ptr()
        if space is not None:
            space.fill(words)
        functions = type(self)._library()
        cut, product = self._cut + "_normed" * bool(floor), self._product + ending
        return [(functions[cut], words), (functions[product], words)]

    def _fill(self, words: Words, x: torch.Tensor, out: torch.Tensor, space: Space | None) -> None:
        assert space is not None
        words[Digits.X], words[Digits.X_STRIDE], words[Digits.OUT] = x.data_ptr(), x.stride(0), out.data_ptr()
        space.fill(words)


class DigitLinear(CutLinear):
    """A product with a weight in 8 bits and a scale for each output. The packed copy is the only copy."""

    _cut, _product, _library = "cut", "digit_product", kernels.digits

    def __init__(
        self,
        weight: torch.Tensor,
        fineness: float,
        bias: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """`weight`: float32 [out, in]; it is quantised here."""
        super().__init__((weight.shape[0], weight.shape[1]), fineness, bias, columns)
        self._packed = torch.empty(self.panels, self.inputs // 4, self._panel, 4, dtype=torch.uint8)
        self._scales = torch.empty(self.width)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        packing = Call((kernels.digits()["pack"], np.zeros(Pack.WORDS, np.int64)))
        words, (place,) = packing.of(self.outputs), packing.arguments
        facts = weight.data_ptr(), weight.stride(0), self.inputs, self._packed.data_ptr(), self._scales.data_ptr()
        words[place + Pack.X : place + Pack.WORDS] = facts
        kernels.digits().run(words.ctypes.data)

    def _pair_weight(self) -> None:
        vectors = self._packed.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
        self._packed = _paired(vectors).unflatten(0, (self.panels, 2)).transpose(1, 2).flatten(2, 3)
        self._scales = _paired(self._scales.view(2 * self.panels, -1)).flatten()

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, as a table gives them."""
        panels, places = np.divmod(ids.numpy(), self._panel)
        codes = (self._packed.numpy()[panels, :, places] ^ DIGIT_BASE).view(np.int8)  # [..., in / 4, 4]
        rows = codes.reshape(*ids.shape, self.inputs) * self._scales.numpy()[ids.numpy()][..., None]
        return torch.from_numpy(rows)


class NibbleLinear(CutLinear):
    """A product with 4-bit weights: codes [out, in], and scale and offset of each group of inputs."""

    _cut, _product, _library = "cut_groups", "nibble_product", kernels.nibbles

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
        self._packed = (low | (high << 4)).contiguous()
        lines = functional.pad(grids, (0, 0, 0, 0, 0, fill)).view(self.panels, self._panel, groups, 2)
        self._scales = lines.permute(0, 2, 3, 1).contiguous()

    def _pair_weight(self) -> None:
        vectors = self._packed.transpose(1, 2).flatten(0, 1)
        self._packed = _paired(vectors).unflatten(0, (self.panels, 2)).transpose(1, 2).contiguous()
        grids = self._scales.unflatten(3, (2, -1)).movedim(3, 1).flatten(0, 1)
        self._scales = _paired(grids).unflatten(0, (self.panels, 2)).movedim(1, 3).flatten(3)
