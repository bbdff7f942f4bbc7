"""A one-layer head on a CPU as one program of our own kernels: norms, the layer, the final norm and the output rows.

A level of a draft is so small that calls of single operations would take as long as their arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream.cache import LayerStore, PageTable
from slipstream.drafters.growing.likeliest import Candidates
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.rope import RopeTable
from slipstream.models.native_layers import Buffers, NativeLayers
from slipstream.models.native_rows import NativeRows, RowGroup
from slipstream.native import kernels
from slipstream.native.call import KernelArgs, Step, address_of, program
from slipstream.native.kernel_args import FloatGemm, Norm, Top
from slipstream.native.linear import Lines, NativeLinear

_LEAVING = 16  # rows with room for their logits, at first
_CHILDREN = 16  # likeliest tokens of a row, at most


Hidden = npt.NDArray[np.float32]  # [rows, width]; arrays, because an operation on a small tensor costs more


class Parts(NamedTuple):
    """What surrounds the layer: `fuse` makes hidden states of features of the target; embeddings and hidden states
    enter side by side, each after a norm; the layer's output is normed for `output`.
    """

    fuse: NativeLinear
    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    output: NativeLinear
    vocab: torch.Tensor  # the tokens of the output rows
    eps: float

    @property
    def chooses(self) -> bool:
        """Whether the likeliest tokens can be found: by whole vectors."""
        return self.output.outputs % kernels.here().lanes == 0


class Left(NamedTuple):
    """The result of a pass: the layer's output, logits, and the likeliest tokens of each row if they were requested."""

    output: Hidden
    logits: torch.Tensor
    likeliest: Candidates | None

    def kept(self) -> Left:
        """The same result with a copy of the logits, for callers that read them after another pass."""
        return self._replace(logits=self.logits.clone())

    def split(self, counts: Seq[int]) -> Iterator[Left]:
        """The result in consecutive parts of `counts` rows each."""
        if len(counts) == 1:
            yield self
            return
        start = 0
        for count in counts:
            some = slice(start, start + count)
            yield Left(self.output[some], self.logits[some], None if self.likeliest is None else self.likeliest[some])
            start += count


@dataclass(frozen=True)
class NodeRows:
    """The nodes of a growing tree that have not been fed yet, as rows of a pass."""

    table: PageTable
    committed: int
    first_slot: int
    paths: list[list[int]]

    @staticmethod
    def of(growth: Growth) -> NodeRows:
        """The rows of a tree."""
        tree, root, fed = growth.tree, growth.root_slot, growth.fed
        paths = [[root, *(root + node for node in tree.path(new))] for new in range(fed, len(tree))]
        return NodeRows(growth.sequence.table, root, root + fed, paths)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.paths)


class _Steps:
    """Programs for certain buffers, and buffers of their own. Built completely or not at all."""

    def __init__(self, parts: Parts, layers: NativeLayers, buffers: Buffers, leaving: int) -> None:
        width = len(parts.norm)
        self.buffers = buffers
        embeddings, self._left = torch.empty(buffers.rows, width), torch.empty(leaving, width)
        self.embedded, self.x = embeddings.numpy(), buffers.x.numpy()[:, :width]
        self.logits = torch.empty(leaving, parts.output.width)
        self.leaving = np.zeros(1, np.int64)  # number of rows with results
        self._spaces = parts.fuse.space(buffers.rows), parts.output.space(leaving)
        self._weights = [weight * width**0.5 for weight in (parts.embed_norm, parts.hidden_norm, parts.norm)]
        self._floor = torch.tensor([parts.eps * width])
        rows, x, normed = layers.facts, Lines.of(buffers.x), Lines.of(buffers.normed)
        beside, left = Lines(normed.address + 4 * width, normed.stride), Lines.of(self._left)
        fuse = parts.fuse.steps(rows, Lines(0, 0), x, self._spaces[0])
        embedded, hidden = self._norm(0, rows, Lines.of(embeddings), normed), self._norm(1, rows, x, beside)
        last = self._norm(2, address_of(self.leaving), x, left)
        output = parts.output.steps(address_of(self.leaving), left, Lines.of(self.logits), self._spaces[1])
        self.shares, self.places = np.empty(leaving * _CHILDREN, np.float32), np.empty(leaving * _CHILDREN, np.int32)
        facts = address_of(self.leaving), self.logits.data_ptr(), self.logits.stride(0), parts.output.outputs
        top = np.array([*facts, 0, address_of(self.shares), address_of(self.places)], np.int64)
        self.features, self.source, self.top = fuse[0][1], last[1], top  # arguments of the steps that read them
        enter = [embedded, hidden, *buffers.steps[0]]
        self._held = fuse, enter, last, output  # the programs have their addresses
        leaves: list[list[Step]] = [[last, *output], [last, *output, (kernels.float32()["top"], top)]]
        # Programs that end with results are indexed by whether they choose the likeliest tokens.
        self.enter, self.leave = program([*fuse, *enter]), [program(leave) for leave in leaves]
        self.known = [program([*fuse, *enter, *leave]) for leave in leaves]
        self.level = [program([*enter, *leave]) for leave in leaves]

    def _norm(self, which: int, rows: int, x: Lines, out: Lines) -> Step:
        weight = self._weights[which]
        facts = [rows, x.address, x.stride, out.address, out.stride, len(weight)]
        return kernels.float32()["norm"], np.array([*facts, self._floor.data_ptr(), weight.data_ptr()], np.int64)


class HeadProgram:
    """Passes over known tokens and over levels of trees."""

    def __init__(self, layers: NativeLayers, parts: Parts) -> None:
        self._layers = layers
        self._parts = parts
        self._tokens = parts.vocab.numpy()
        self._steps = _Steps(parts, layers, layers.buffers(1), _LEAVING)

    def rows(self, groups: Seq[RowGroup], rope: RopeTable) -> NativeRows:
        """The rows of a pass."""
        return self._layers.rows(groups, rope)

    def known(
        self,
        rows: NativeRows,
        embedded: torch.Tensor,
        features: torch.Tensor,
        store: LayerStore,
        wanted: Seq[int],
        count: int,
    ) -> Left:
        """Rows of known tokens with features of the target; returns those in `wanted`, with `count` tokens each."""
        steps = self._entered(rows, embedded, store, len(wanted))
        steps.features[FloatGemm.X], steps.features[FloatGemm.X_STRIDE] = features.data_ptr(), features.stride(0)
        if len(wanted) == 1:
            last = steps.x[wanted[0] : wanted[0] + 1]
            return self._left(steps, last, steps.known[self._chooses(count)], count).kept()
        kernels.float32().run(address_of(steps.enter))
        last = steps.x[wanted]
        if not wanted:
            return Left(last, steps.logits[:0, : self._parts.output.outputs], [])
        return self._left(steps, last, steps.leave[self._chooses(count)], count).kept()

    def level(self, rows: NativeRows, embedded: torch.Tensor, hidden: Hidden, store: LayerStore, count: int) -> Left:
        """Rows of nodes with the outputs at their parents; returns all of them, with `count` tokens each.

        The next pass overwrites the logits.
        """
        steps = self._entered(rows, embedded, store, len(embedded))
        x = steps.x[: len(embedded)]
        x[:] = hidden
        return self._left(steps, x, steps.level[self._chooses(count)], count)

    def _chooses(self, count: int) -> bool:
        return 0 < count <= _CHILDREN and self._parts.chooses

    def _left(self, steps: _Steps, rows: Hidden, args: KernelArgs, count: int) -> Left:
        """Run a program that ends with the norm and the output rows; returns the results of these rows."""
        leaving = len(rows)
        steps.leaving[0], steps.top[Top.COUNT] = leaving, count
        steps.source[Norm.X], steps.source[Norm.X_STRIDE] = rows.ctypes.data, rows.strides[0] // rows.itemsize
        kernels.float32().run(address_of(args))
        likeliest = None
        if self._chooses(count):
            # There is no column for NaN.
            places = np.minimum(steps.places[: leaving * count], len(self._tokens) - 1)
            found = list(zip(self._tokens[places].tolist(), steps.shares[: leaving * count].tolist(), strict=True))
            likeliest = [found[first : first + count] for first in range(0, leaving * count, count)]
        return Left(rows.copy(), steps.logits[:leaving, : self._parts.output.outputs], likeliest)

    def _entered(self, rows: NativeRows, embedded: torch.Tensor, store: LayerStore, leaving: int) -> _Steps:
        buffers = self._layers.buffers(len(embedded))
        if self._steps.buffers is not buffers or leaving > len(self._steps.logits):
            room = max(len(self._steps.logits), 1 << max(0, leaving - 1).bit_length())
            self._steps = _Steps(self._parts, self._layers, buffers, room)
        self._layers.read(rows, [store])
        self._steps.embedded[: len(embedded)] = embedded.numpy()
        return self._steps


def head_program(
    layers: NativeLayers | None,
    fuse: Linear,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: Linear,
    vocab: torch.Tensor,
    eps: float,
) -> HeadProgram | None:
    """The head as a program, if all of it runs by our own kernels. Norms: of embeddings, hidden states and outputs."""
    if layers is None or not (isinstance(fuse, NativeLinear) and isinstance(output, NativeLinear)):
        return None
    if len(norms[2]) % kernels.here().lanes or fuse.width > layers.buffers(1).x.shape[1]:
        return None
    return HeadProgram(layers, Parts(fuse, *norms, output, vocab, eps))
