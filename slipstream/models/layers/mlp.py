"""The gated MLP of a layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from slipstream.attention.even import LANES, Elementwise, evenly
from slipstream.gpu.fused import gated, runs_fused
from slipstream.gpu.layer_ops import DeferredNorm
from slipstream.models.config import ModelConfig
from slipstream.models.layers.gpu_mixture import GroupedMixture, stacked
from slipstream.models.layers.linear import AddingLinear, Linear, MakeLinear, add_product, make_linear
from slipstream.models.weights import joined

even_silu: Elementwise = partial(evenly, functional.silu)
even_gelu: Elementwise = partial(evenly, partial(functional.gelu, approximate="tanh"))
ACTIVATIONS = {"silu": even_silu, "gelu_tanh": even_gelu}  # by their names in ModelConfig


class MLP(Protocol):
    """[rows, width] -> [rows, width], row by row."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to rows."""
        ...


class DenseMLP:
    """down(activation(gate(x)) * up(x)), gate and up in one GEMM."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Elementwise) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        if self.activation is even_silu and runs_fused(both):
            return self.down(gated(both))
        # `as_strided`, because `chunk` takes twice as long.
        rows, width = both.shape
        start, half = both.storage_offset(), ((rows, width // 2), both.stride())
        gate, up = both.as_strided(*half, start), both.as_strided(*half, start + width // 2)
        return self.down(self.activation(gate).mul_(up))

    @property
    def defers_norm(self) -> bool:
        """Whether this MLP takes unnormalised rows and applies the norm after the first GEMM."""
        return self.activation is even_silu and isinstance(self.gate_up, AddingLinear) and not self.gate_up.biased

    def onto_(self, total: torch.Tensor, deferred: DeferredNorm) -> None:
        """Add to `total` the output for the rows of `deferred`; on a GPU, if `defers_norm`."""
        assert isinstance(self.gate_up, AddingLinear)
        add_product(total, self.down, self.gate_up.gates(deferred))


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
            # One addition after the other: a library's sum may use another order for another number of rows.
            weights = weights / sum(weights.unbind(-1), weights.new_zeros(()))[:, None]
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, rank = (chosen == number).nonzero(as_tuple=True)
            share = weights[rows, rank, None].to(x.dtype)
            result[rows] += self._experts[number](x[rows]) * share
        return result


class AfterNorm(NamedTuple):
    """Matrices after a norm, by name: with its weight folded in, or with the weight separately as `columns`."""

    read: Callable[[str], torch.Tensor]
    columns: torch.Tensor | None  # [width]


def make_mlp(
    config: ModelConfig,
    mixture: bool,
    read: Callable[[str], torch.Tensor],
    after_norm: AfterNorm,
    linear: MakeLinear,
    grouped: bool,
) -> MLP:
    """The MLP of one layer; `read` gives its other weights by name, `linear` makes its GEMMs.

    `grouped`: experts are chosen on a GPU, with plain GEMMs and silu gates.
    """
    activation = ACTIVATIONS[config.activation]

    def matrices(prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        down = read(f"{prefix}down")
        fill = -down.shape[1] % LANES  # zero units pad the width to whole vectors
        gate, up = (after_norm.read(prefix + name) for name in ("gate", "up"))
        if fill:
            gate, up = (functional.pad(weight, (0, 0, 0, fill)) for weight in (gate, up))
            down = functional.pad(down, (0, fill))
        return joined(gate, up), down

    def dense(prefix: str) -> DenseMLP:
        both, down = matrices(prefix)
        return DenseMLP(linear(both, columns=after_norm.columns), linear(down), activation)

    if not mixture:
        return dense("")

    def router() -> Linear:
        weight = after_norm.read("router")  # small, and a wrong expert is more than a rounding error: never quantised
        return make_linear(weight if after_norm.columns is None else weight * after_norm.columns)

    prefixes = [f"experts.{number}." for number in range(config.experts)]
    if grouped:
        stacks = stacked(map(matrices, prefixes), config.experts)
        return GroupedMixture(router(), stacks, config.experts_per_token, config.norm_topk)
    experts = [dense(prefix) for prefix in prefixes]
    return MixtureMLP(router(), experts, config.experts_per_token, config.norm_topk)
