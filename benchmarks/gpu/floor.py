"""The floor of a step: the GEMMs of the model, one after the other in one graph, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import captured, device_ms
from slipstream.models.decoder import Decoder
from slipstream.models.layers.gpu_mixture import GroupedMixture
from slipstream.models.layers.linear import Linear, PlainLinear
from slipstream.models.layers.mlp import MLP, DenseMLP

Product = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]  # a GEMM, and its input


@dataclass(frozen=True)
class Floor:
    """The time for one number of rows."""

    rows: int
    ms: float
    gb_per_s: float  # bandwidth of reading the weights


def floor(model: Decoder, rows: int) -> Floor:
    """The GEMMs over `rows` rows. Those of an MoE are the library's, over the rows that chose each expert."""
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
    """All GEMMs of a pass over `rows` random rows."""
    config = model.config

    def some(width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=model.dtype, device=model.device)

    x, mixed = some(config.hidden_size), some(config.heads * config.head_dim)
    work: list[Product] = []
    for layer in model.layers:
        work += [(layer.qkv, x), (layer.out, mixed), *_of_mlp(layer.mlp, x)]
    return [*work, (model.head, x)]


def _read(work: list[Product]) -> int:
    """Weights that GEMMs read: outputs times inputs."""
    return sum(product(given).shape[1] * given.shape[1] * given.element_size() for product, given in work)


def _of_mlp(mlp: MLP, x: torch.Tensor) -> list[Product]:
    """The GEMMs of an MLP over rows [rows, width]."""
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
    """Both GEMMs, without the gates, which do not change their cost."""
    return [(gate_up, x), (down, gate_up(x).chunk(2, 1)[1].contiguous())]
