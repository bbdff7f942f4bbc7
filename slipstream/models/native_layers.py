"""All layers of a pass as one program of our own kernels: nothing is asked of Python between the first and the last.

For dense layers of the usual kind on a CPU; `native_layers` says whether a model's are. Whatever they are not made for
runs operation by operation, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from slipstream.attention import Segment
from slipstream.cache import LayerStore
from slipstream.models.config import ModelConfig
from slipstream.models.mlp import DenseMLP, even_silu
from slipstream.models.native_rows import NativeRows, attention_steps, native_shape, read_pages
from slipstream.models.rope import RopeTable
from slipstream.native import kernels
from slipstream.native.call import Step, Words, program
from slipstream.native.linear import ADDED, GATED, WRITTEN, Lines, NativeLinear
from slipstream.native.shape import Shape
from slipstream.native.words import Pass

if TYPE_CHECKING:
    from slipstream.models.decoder import Layer

_LEAST_ROWS = 64  # that there is memory for; more is made in powers of two


class DenseProducts(NamedTuple):
    """The products of a dense layer, all of them by our own kernels."""

    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear


def _products(layer: Layer) -> DenseProducts | None:
    """Those of a layer that has nothing beside them."""
    mlp = layer.mlp
    if layer.q_norm is not None or layer.limits is not None or not isinstance(mlp, DenseMLP):
        return None
    if mlp.activation is not even_silu:
        return None
    return dense_products(layer.qkv, layer.out, mlp.gate_up, mlp.down)


def dense_products(*parts: object) -> DenseProducts | None:
    """The four products, if all of them are by our own kernels and gates can be applied in one of them."""
    native = [part for part in parts if isinstance(part, NativeLinear)]
    if len(native) < len(parts) or not native[2].can_pair:
        return None
    return DenseProducts(*native)


def native_layers(config: ModelConfig, layers: Sequence[Layer], ropes: Sequence[RopeTable]) -> NativeLayers | None:
    """The layers as programs, if all of them can be."""
    shape = native_shape(config)
    if shape is None or len(ropes) > 1:
        return None
    found = [products for layer in layers if (products := _products(layer)) is not None]
    sizes = {tuple((part.inputs, part.width) for part in products) for products in found}
    if len(found) < len(layers) or len(sizes) > 1:  # all layers use the same memory
        return None
    return NativeLayers(shape, config, found, [layer.window for layer in layers])


class _Memory:
    """What a pass over at most `rows` rows writes on its way."""

    def __init__(self, parts: DenseProducts, rows: int) -> None:
        self.rows = rows
        self.x = torch.empty(rows, parts.out.width)
        self.normed = torch.empty(rows, parts.qkv.inputs)
        self.qkv = torch.empty(rows, parts.qkv.width)
        self.mixed = torch.empty(rows, parts.out.inputs)
        self.gated = torch.empty(rows, parts.down.inputs)
        self.space = max(parts, key=lambda part: part.inputs).space(rows)


class NativeLayers:
    """The layers of one model, and the memory that every pass of theirs uses again."""

    def __init__(
        self,
        shape: Shape,
        config: ModelConfig,
        layers: Sequence[DenseProducts],
        windows: Sequence[int | None],
        *,
        entered: bool = False,
    ) -> None:
        """`entered`: what goes into the first product is given with the rows; there is one layer then."""
        self.shape = shape
        self._entered = entered
        self._layers = layers
        self._windows = windows
        self._kernels = kernels.layers(shape)
        for layer in layers:
            layer.gate_up.pair()
        self._floor = torch.tensor([config.norm_eps * config.hidden_size])
        self._ones = torch.ones(config.hidden_size)
        self._facts = np.zeros(Pass.WORDS, np.int64)  # of the pass that runs
        self._store = 0  # the address of the one whose pages the steps use
        self._prepare(_LEAST_ROWS)

    def rows(self, segments: Sequence[Segment], rope: RopeTable) -> NativeRows:
        """The rows of a pass as these layers read them."""
        return NativeRows(segments, self.shape, rope)

    def run_(
        self,
        x: torch.Tensor,
        rows: NativeRows,
        data: Sequence[LayerStore],
        layers: Iterable[int],
        taps: Sequence[int] = (),
        inputs: torch.Tensor | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run hidden states [rows, width] through layers, in place; returns copies of the tapped ones."""
        if len(x) > self._memory.rows:
            self._prepare(1 << (len(x) - 1).bit_length())
        self.read(rows, data)
        hidden = self._memory.x[: x.shape[0], : x.shape[1]]
        hidden.copy_(x)
        if inputs is not None:
            self._memory.normed[: len(inputs), : inputs.shape[1]].copy_(inputs)
        tapped: dict[int, torch.Tensor] = {}
        pending: list[int] = []
        for index in layers:
            pending.append(index)
            if index in taps:
                self._run(tuple(pending))
                tapped[index] = hidden.clone()
                pending = []
        self._run(tuple(pending))
        x.copy_(hidden)
        return tapped

    def _run(self, layers: tuple[int, ...]) -> None:
        if not layers:
            return
        if layers not in self._programs:
            self._programs[layers] = program([step for index in layers for step in self.steps[index]])
        self._kernels.run(self._programs[layers].ctypes.data)

    def read(self, rows: NativeRows, data: Sequence[LayerStore]) -> None:
        """Have the steps work on rows, which must stay as long as they do, and on the pages of a store."""
        self._facts[:] = rows.facts
        store: int = data[0].both.data_ptr()
        if self._store != store:
            self._store = store
            for layer, steps in zip(data, self._attending, strict=True):
                read_pages(*steps, layer)

    def _prepare(self, rows: int) -> None:
        """Memory for passes over so many rows, and all steps with its addresses."""
        self._memory = _Memory(self._layers[0], rows)
        self._programs: dict[tuple[int, ...], Words] = {}
        self._store = 0
        self._attending: list[tuple[Step, Step]] = []
        self.steps = [self._layer_steps(*each) for each in zip(self._layers, self._windows, strict=True)]

    def _layer_steps(self, layer: DenseProducts, window: int | None) -> list[Step]:
        memory, count = self._memory, self._facts.ctypes.data
        x, qkv, mixed = Lines.of(memory.x), Lines.of(memory.qkv), Lines.of(memory.mixed)
        gated = Lines.of(memory.gated)
        turning, attending = attention_steps(self.shape, count, qkv, mixed, window)
        self._attending.append((turning, attending))
        given = Lines.of(memory.normed)
        entering = layer.qkv.steps(count, given, qkv, memory.space)
        return [
            *(entering if self._entered else self._behind_norm(layer.qkv, x, qkv)),
            turning,
            attending,
            *layer.out.steps(count, mixed, x, memory.space, ending=ADDED),
            *self._behind_norm(layer.gate_up, x, gated, GATED),
            *layer.down.steps(count, gated, x, memory.space, ending=ADDED),
        ]

    def _behind_norm(self, part: NativeLinear, x: Lines, out: Lines, ending: str = WRITTEN) -> list[Step]:
        memory, count, floor = self._memory, self._facts.ctypes.data, self._floor.data_ptr()
        if part.norms:
            return part.steps(count, x, out, memory.space, ending=ending, floor=floor)
        normed = Lines.of(memory.normed)
        lines = x.address, x.stride, normed.address, normed.stride
        norming = np.array([count, *lines, part.inputs, floor, self._ones.data_ptr()], np.int64)
        return [(self._kernels["norm"], norming), *part.steps(count, normed, out, memory.space, ending=ending)]
