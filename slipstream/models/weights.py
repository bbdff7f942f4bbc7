"""From a checkpoint to what a decoder computes with: tensors, tables and GEMMs."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from slipstream.models.fingerprint import Fingerprint
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.kept_weights import KeptWeights, WeightsFile
from slipstream.models.layers.exact_linear import ExactLinear
from slipstream.models.layers.linear import Linear, make_linear
from slipstream.models.layers.quantized import (
    Int8Linear,
    Int8Matrix,
    QuantizedLinear,
    linear_from_packed,
    packed_of,
    quantized_linear,
)
from slipstream.models.shapes import expected_shape, is_matrix
from slipstream.native.linear import NativeInt8Linear
from slipstream.notice import notice

log = logging.getLogger("slipstream")

_PER_SECOND = 100_000_000  # weights that two cores convert


class Table(Protocol):
    """Something that gives rows for ids."""

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor: ...


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """All rows in one tensor; works on meta tensors without torch's `cat`, which would load a compiler for them."""
    first = parts[0]
    return first.new_empty(sum(map(len, parts)), *first.shape[1:]) if first.is_meta else torch.cat(parts)


class Weights:
    """The weights of one model, while its decoder is being built.

    If quantised matrices are cached, `read` returns meta tensors in their place. They may be `joined` like others, and
    `linear` takes the next cached GEMM.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        quantize: str,
        *,
        exact: bool,
        weights_file: WeightsFile | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype, self._device = dtype, device
        self._quantize = quantize
        self._exact = exact
        self._fingerprint = Fingerprint(checkpoint.config)
        self._weights_file = weights_file
        self._kept = None if weights_file is None else weights_file.load()
        if weights_file is not None and self._kept is None:
            seconds = max(1, checkpoint.config.parameters // _PER_SECOND)
            said = "converting %s to %s (cached for later starts, about %d s)"
            notice(log, said, checkpoint.name, quantize, seconds)
        self._next = iter(() if self._kept is None else self._kept.products)
        self._made: list[Linear | Int8Matrix] = []  # in the order of the cache file

    def read(self, name: str) -> torch.Tensor:
        """One weight by its canonical name."""
        shape = expected_shape(self._checkpoint.config, name)
        if self._kept is not None and is_matrix(name, shape):
            return torch.empty(shape, dtype=self._dtype, device="meta")
        weight = self._checkpoint.weight(name)
        self._fingerprint.add(name, weight)
        return weight.to(device=self._device, dtype=self._dtype)

    def tables(self) -> tuple[Table, Linear]:
        """The embedding table and the output GEMM. With 4-bit layers these have 8 bits, for accuracy."""
        embed, tied = self.read("embed"), self._checkpoint.config.tied_head
        if self._quantize == "none":
            return embed, self.linear(embed if tied else self.read("head"))
        if tied:
            product = self._quantised("int8", embed)
            if isinstance(product, Int8Linear):
                return product.matrix, product
            assert isinstance(product, NativeInt8Linear)  # it also serves as the table
            return product, product
        table = Int8Matrix.from_packed(next(self._next)) if embed.is_meta else Int8Matrix(embed)
        self._made.append(table)
        del embed  # keep only one dequantised matrix at a time
        return table, self._quantised("int8", self.read("head"))

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> Linear:
        """The GEMM with a weight, for this model's device, dtype and quantisation."""
        if self._exact:
            return ExactLinear(weight, bias)
        if self._quantize == "none":
            return make_linear(weight, bias)  # the columns are folded in
        return self._quantised(self._quantize, weight, bias, columns)

    def _quantised(
        self, mode: str, weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> QuantizedLinear:
        if weight.is_meta:
            return linear_from_packed(mode, weight.shape, next(self._next), bias, columns)
        made = quantized_linear(mode, weight, bias, columns)
        self._made.append(made)
        return made

    def all_made(self) -> str:
        """The model's fingerprint, after everything is made; writes the cache file if needed."""
        if self._kept is not None:
            return self._kept.fingerprint
        packed = [packed_of(made) for made in self._made]
        whole = [each for each in packed if each is not None]
        if self._weights_file is not None and len(whole) == len(packed):
            self._weights_file.keep(KeptWeights(str(self._fingerprint), whole))
        self._made.clear()
        return str(self._fingerprint)
