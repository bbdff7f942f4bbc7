"""The gated MLP of a layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from slipstream.models.config import ModelConfig
from slipstream.models.linear import Linear, make_linear

_GRAIN = 32_768  # elements above which an elementwise kernel is split among threads
_LANES = 32  # elements of one unrolled vector iteration


class MLP(Protocol):
    """[rows, width] -> [rows, width], each row for itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to rows."""
        ...


class DenseMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        half = both.shape[1] // 2
        return self.down(even_silu(both.narrow(1, 0, half)).mul_(both.narrow(1, half, half)))


class MixtureMLP:
    """The best experts of each row, weighted; experts in ascending order, so that a row's sum has one order."""

    def __init__(self, router: Linear, experts: list[DenseMLP], per_token: int, norm_topk: bool) -> None:
        self._router = router
        self._experts = experts
        self._per_token = per_token
        self._norm_topk = norm_topk

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.softmax(self._router(x).float(), dim=-1).topk(self._per_token, dim=-1)
        if self._norm_topk:
            # One addition after the other: a library's sum may take another order for another number of rows.
            weights = weights / sum(weights.unbind(-1), weights.new_zeros(()))[:, None]
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, rank = (chosen == number).nonzero(as_tuple=True)
            share = weights[rows, rank, None].to(x.dtype)
            result[rows] += self._experts[number](x[rows]) * share
        return result


def even_silu(gate: torch.Tensor) -> torch.Tensor:
    """silu of [rows, width], the width being whole vectors, such that no split among threads cuts through a vector.

    A scalar remainder rounds differently. Where a split would leave one, rows are taken in pieces for one thread.
    """
    rows, width = gate.shape
    if rows * width <= _GRAIN or rows * width % (_LANES * torch.get_num_threads()) == 0:
        return functional.silu(gate)
    return torch.cat([functional.silu(part) for part in gate.split(max(1, _GRAIN // width))])


def make_mlp(
    config: ModelConfig, read: Callable[[str], torch.Tensor], read_behind_norm: Callable[[str], torch.Tensor]
) -> MLP:
    """The MLP of one layer; the readers give its weights by name, as they are or with the norm's weight folded in."""

    def dense(prefix: str) -> DenseMLP:
        # Units that are always 0 fill the last vector of the width up.
        fill = -config.intermediate_size % _LANES
        gate, up = (functional.pad(read_behind_norm(prefix + name), (0, 0, 0, fill)) for name in ("gate", "up"))
        down = functional.pad(read(f"{prefix}down"), (0, fill))
        return DenseMLP(make_linear(torch.cat([gate, up])), make_linear(down))

    if not config.experts:
        return dense("")
    experts = [dense(f"experts.{number}.") for number in range(config.experts)]
    router = make_linear(read_behind_norm("router"))
    return MixtureMLP(router, experts, config.experts_per_token, config.norm_topk)
