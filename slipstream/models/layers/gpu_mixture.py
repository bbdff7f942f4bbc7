"""A mixture of experts on a GPU: routing on the device, reading only the weights of chosen experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from slipstream.gpu.fused import gated
from slipstream.models.layers.linear import Linear


class Stacks(NamedTuple):
    """The matrices of all experts of a layer."""

    gate_up: torch.Tensor  # [experts, 2 * inner, width]
    down: torch.Tensor  # [experts, width, inner]


def stacked(matrices: Iterable[tuple[torch.Tensor, torch.Tensor]], experts: int) -> Stacks:
    """Stack the matrices of each expert, gate_up and down, made one after the other and not kept."""
    stacks: Stacks | None = None
    for number, pair in enumerate(matrices):
        if stacks is None:
            stacks = Stacks(*(matrix.new_empty(experts, *matrix.shape) for matrix in pair))
        for stack, matrix in zip(stacks, pair, strict=True):
            stack[number] = matrix
    assert stacks is not None
    return stacks


class GroupedMixture:
    """The best experts of each row, weighted, as in `MixtureMLP`, with silu gates; can be captured.

    The GEMMs gather the rows of each expert. Their results are weighted and added in float32, experts in ascending
    order, so that a row's sum has one order.
    """

    def __init__(self, router: Linear, experts: Stacks, per_token: int, norm_topk: bool) -> None:
        self.router = router
        self.experts = experts
        self._per_token = per_token
        self._norm_topk = norm_topk

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        self.onto_(total, x)
        return total

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row, int32 [rows, per_token], ascending, and their shares, float32."""
        from slipstream.gpu.kernels import mixture_kernels as kernels

        return kernels.choose(self.router(x), self._per_token, self._norm_topk)

    def onto_(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add to `total` [rows, width] the output for the rows of x."""
        from slipstream.gpu.kernels import mixture_kernels as kernels

        chosen, shares = self.choose(x)
        groups = kernels.group(chosen, len(self.experts.gate_up))
        middle = gated(kernels.product(x, self.experts.gate_up, groups, x.dtype))
        kernels.add_(total, kernels.product(middle, self.experts.down, groups, torch.float32), shares)
