"""All layers of a pass as one program of our own kernels, without Python between the first and the last.

For dense layers of the usual kind on a CPU; `native_layers` checks whether a model's are. Other layers run operation by
operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from slipstream.cache import LayerStore
from slipstream.models.config import ModelConfig
from slipstream.models.layers.mlp import DenseMLP, even_silu
from slipstream.models.layers.rope import RopeTable
from slipstream.models.native_rows import NativeRows, RowGroup, attention_steps, native_shape, read_pages
from slipstream.native import kernels
from slipstream.native.call import KernelArgs, Step, address_of, program
from slipstream.native.kernel_args import Pass
from slipstream.native.linear import ADDED, GATED, WRITTEN, Lines, NativeLinear
from slipstream.native.shape import Shape

if TYPE_CHECKING:
    from slipstream.models.decoder import Layer

_LEAST_ROWS = 64  # of the smallest buffer; more are allocated in powers of two


class DenseGemms(NamedTuple):
    """The GEMMs of a dense layer, all by our own kernels."""

    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear


def _gemms(layer: Layer) -> DenseGemms | None:
    """The GEMMs of a layer without extras."""
    mlp = layer.mlp
    if layer.q_norm is not None or layer.limits is not None or not isinstance(mlp, DenseMLP):
        return None
    if mlp.activation is not even_silu:
        return None
    return dense_gemms(layer.qkv, layer.out, mlp.gate_up, mlp.down)


def dense_gemms(*parts: object) -> DenseGemms | None:
    """The four GEMMs, if all are by our own kernels and one of them can apply the gates."""
    native = [part for part in parts if isinstance(part, NativeLinear)]
    if len(native) < len(parts) or not native[2].can_pair:
        return None
    return DenseGemms(*native)


def native_layers(config: ModelConfig, layers: Sequence[Layer], ropes: Sequence[RopeTable]) -> NativeLayers | None:
    """The layers as programs, if all of them are supported."""
    shape = native_shape(config)
    if shape is None or len(ropes) > 1:
        return None
    found = [gemms for layer in layers if (gemms := _gemms(layer)) is not None]
    sizes = {tuple((part.inputs, part.width) for part in gemms) for gemms in found}
    if len(found) < len(layers) or len(sizes) > 1:  # all layers use the same buffers
        return None
    return NativeLayers(shape, config, found, [layer.window for layer in layers])


class Buffers:
    """The buffers of a pass over at most `rows` rows, and the steps compiled for their addresses.

    `x`: the rows, which layers add to. `normed`: the input of the first GEMM, if it is given with the rows.
    """

    def __init__(self, parts: DenseGemms, rows: int) -> None:
        self.rows = rows
        self.steps: list[list[Step]] = []  # the steps of every layer
        self.attending: list[tuple[Step, Step]] = []  # the steps that use pages
        self.programs: dict[tuple[int, ...], KernelArgs] = {}
        self.store = 0, 0  # first and last address of the store that all steps use
        self.x = torch.empty(rows, parts.out.width)
        self.normed = torch.empty(rows, parts.qkv.inputs)
        self.qkv = torch.empty(rows, parts.qkv.width)
        self.mixed = torch.empty(rows, parts.out.inputs)
        self.gated = torch.empty(rows, parts.down.inputs)
        self.space = max(parts, key=lambda part: part.inputs).space(rows)


class NativeLayers:
    """The layers of one model, and the buffers that every pass reuses."""

    def __init__(
        self,
        shape: Shape,
        config: ModelConfig,
        layers: Sequence[DenseGemms],
        windows: Sequence[int | None],
        *,
        entered: bool = False,
    ) -> None:
        """`entered`: the input of the first GEMM is given with the rows; there is one layer then."""
        self.shape = shape
        self._entered = entered
        self._layers = layers
        self._windows = windows
        self._kernels = kernels.layers(shape)
        for layer in layers:
            layer.gate_up.pair()
        self._floor = torch.tensor([config.norm_eps * config.hidden_size])
        self._ones = torch.ones(config.hidden_size)
        self._facts = np.zeros(Pass.LENGTH, np.int64)  # the facts of the current pass
        self._memory = self._prepared(_LEAST_ROWS)

    @property
    def steps(self) -> list[list[Step]]:
        """The steps of every layer."""
        return self._memory.steps

    @property
    def facts(self) -> int:
        """The address of the facts of the current pass; the first one is the number of rows."""
        return address_of(self._facts)

    def buffers(self, rows: int) -> Buffers:
        """The buffers of a pass, with room for `rows` rows; new ones if the present ones are too small."""
        if rows > self._memory.rows:
            self._memory = self._prepared(1 << (rows - 1).bit_length())
        return self._memory

    def rows(self, segments: Sequence[RowGroup], rope: RopeTable) -> NativeRows:
        """The rows of a pass in the format of these layers."""
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
        hidden = self.buffers(len(x)).x[: x.shape[0], : x.shape[1]]
        self.read(rows, data)
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
        memory = self._memory
        if layers not in memory.programs:
            memory.programs[layers] = program([step for index in layers for step in memory.steps[index]])
        self._kernels.run(address_of(memory.programs[layers]))

    def read(self, rows: NativeRows, data: Sequence[LayerStore]) -> None:
        """Point the steps to these rows, which must outlive them, and to the pages of a store."""
        self._facts[:] = rows.facts
        store = data[0].keys.data_ptr(), data[-1].values.data_ptr()
        if self._memory.store != store:
            self._memory.store = 0, 0  # an interrupt may leave steps with the pages of either store
            for layer, steps in zip(data, self._memory.attending, strict=True):
                read_pages(*steps, layer)
            self._memory.store = store

    def _prepared(self, rows: int) -> Buffers:
        """Buffers for `rows` rows, and all steps with their addresses, built completely or not at all."""
        memory = Buffers(self._layers[0], rows)
        for layer, window in zip(self._layers, self._windows, strict=True):
            memory.steps.append(self._layer_steps(memory, layer, window))
        return memory

    def _layer_steps(self, memory: Buffers, layer: DenseGemms, window: int | None) -> list[Step]:
        count = address_of(self._facts)
        x, qkv, mixed = Lines.of(memory.x), Lines.of(memory.qkv), Lines.of(memory.mixed)
        gated = Lines.of(memory.gated)
        rotating, attending = attention_steps(self.shape, count, qkv, mixed, window)
        memory.attending.append((rotating, attending))
        given = Lines.of(memory.normed)
        entering = layer.qkv.steps(count, given, qkv, memory.space)
        return [
            *(entering if self._entered else self._after_norm(memory, layer.qkv, x, qkv)),
            rotating,
            attending,
            *layer.out.steps(count, mixed, x, memory.space, ending=ADDED),
            *self._after_norm(memory, layer.gate_up, x, gated, GATED),
            *layer.down.steps(count, gated, x, memory.space, ending=ADDED),
        ]

    def _after_norm(
        self, memory: Buffers, part: NativeLinear, x: Lines, out: Lines, ending: str = WRITTEN
    ) -> list[Step]:
        count, floor = address_of(self._facts), self._floor.data_ptr()
        if part.norms:
            return part.steps(count, x, out, memory.space, ending=ending, floor=floor)
        normed = Lines.of(memory.normed)
        lines = x.address, x.stride, normed.address, normed.stride
        norming = np.array([count, *lines, part.inputs, floor, self._ones.data_ptr()], np.int64)
        return [(self._kernels["norm"], norming), *part.steps(count, normed, out, memory.space, ending=ending)]
