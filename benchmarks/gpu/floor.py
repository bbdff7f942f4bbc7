"""The floor of a step: the matrix products of the model, one after the other in one graph, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import captured, device_ms
from slipstream.models.decoder import Decoder
from slipstream.models.gpu_mixture import GroupedMixture
from slipstream.models.linear import Linear, PlainLinear
from slipstream.models.mlp import MLP, DenseMLP

Product = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]  # and the rows that it is given


@dataclass(frozen=True)
class Floor:
    """One number of rows."""

    rows: int
    ms: float
    gb_per_s: float  # of weights that were read


def floor(model: Decoder, rows: int) -> Floor:
    """The products over so many rows. Those of a mixture are the library's, over the rows that chose each expert."""
    with torch.inference_mode():
        work = _products(model, rows)

        def products() -> None:
            for product, given in work:
                product(given)

        ms = device_ms(captured(products))
        return Floor(rows, ms, _read(work) / ms / 1e6)


def weights_of_a_row(model: Decoder) -> int:
    """Bytes of weights that a pass over one row reads."""
    with torch.inference_mode():
        return _read(_products(model, 1))


def _products(model: Decoder, rows: int) -> list[Product]:
    """All products of a pass over so many random rows."""
    config = model.config

    def some(width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=model.dtype, device=model.device)

    x, mixed = some(config.hidden_size), some(config.heads * config.head_dim)
    work: list[Product] = []
    for layer in model.layers:
        work += [(layer.qkv, x), (layer.out, mixed), *_of_mlp(layer.mlp, x)]
    return [*work, (model.head, x)]


def _read(work: list[Product]) -> int:
    """What products read, their rows left out: a matrix has as many numbers as an output times an input."""
    return sum(product(given).shape[1] * given.shape[1] * given.element_size() for product, given in work)


def _of_mlp(mlp: MLP, x: torch.Tensor) -> list[Product]:
    """The products of an MLP over rows [rows, width]."""
    if isinstance(mlp, DenseMLP):
        return _gated(mlp.gate_up, mlp.down, x)
    assert isinstance(mlp, GroupedMixture)
    work: list[Product] = [(mlp.router, x)]
    chosen, _ = mlp.choose(x)
    for number in chosen.unique().tolist():
        gate_up, down = (PlainLinear(stack[number], None) for stack in mlp.experts)
        work += _gated(gate_up, down, x[(chosen == number).any(1)])
    return work


def _gated(gate_up: Linear, down: Linear, x: torch.Tensor) -> list[Product]:
    """Both products; the gates may stand open, it costs the same."""
    return [(gate_up, x), (down, gate_up(x).chunk(2, 1)[1].contiguous())]
