"""The optimiser: Muon for matrices, AdamW for everything else.

Muon moves a matrix along its momentum with all singular values made nearly 1: directions with small gradients are
learnt as fast as those with large ones. It needs half of AdamW's memory. Vectors, and matrices whose rows are tokens,
positions or heads (`Head.tables`), use AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.drafters.heads.head import Head
from slipstream.train.state import Tensors

_BETAS, _DECAY = (0.9, 0.95), 0.01
_MOMENTUM = 0.95
_LIKE_ADAM = 0.2  # RMS of an AdamW step: both kinds of weights then share one learning rate
# Five iterations x -> a x + b x^3 + c x^5 bring singular values from 0.001...1 to 0.7...1.2 (Keller Jordan's
# constants).
_ITERATIONS, _POLYNOMIAL = 5, (3.4445, -4.7750, 2.0315)


def flattened(matrices: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns] -> matrices with the same singular directions whose singular values are all near 1."""
    a, b, c = _POLYNOMIAL
    # No singular value is larger than the norm of its matrix, which may be zero.
    lengths: torch.Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = matrices / (1.01 * lengths).clamp_min(1e-30)
    if x.is_cuda:
        x = x.to(torch.bfloat16)  # exact enough, and much faster
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT.contiguous() if tall else x).to(matrices.dtype)  # in the layout of the weights


class Muon(torch.optim.Optimizer):
    """Steps along orthogonalised momentum, of the length of AdamW's steps.

    Matrices of one shape are updated together: one by one they would be most of the kernel launches of a training step.
    """

    def __init__(self, weights: Sequence[torch.Tensor], rate: float) -> None:
        super().__init__(weights, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.shape, []).append(weight)
            for weights in alike.values():
                self._move(weights, group["lr"])

    def _move(self, weights: list[torch.Tensor], rate: float) -> None:
        """Update weights of one shape."""
        gradients = torch.stack([weight.grad for weight in weights if weight.grad is not None])
        momenta = [self._momentum(weight) for weight in weights]
        torch._foreach_lerp_(momenta, list(gradients), 1 - _MOMENTUM)
        directions = flattened(gradients.lerp(torch.stack(momenta), _MOMENTUM))
        torch._foreach_mul_(weights, 1 - rate * _DECAY)
        torch._foreach_add_(weights, list(directions), alpha=-rate * _LIKE_ADAM * max(weights[0].shape) ** 0.5)

    def _momentum(self, weight: torch.Tensor) -> torch.Tensor:
        memory = self.state[weight]
        if not memory:
            memory["momentum"] = torch.zeros_like(weight)
        momentum: torch.Tensor = memory["momentum"]
        return momentum


class Optimiser:
    """All weights of a head and their optimiser state."""

    def __init__(self, head: Head, rate: float, *, fused: bool) -> None:
        inner = head.matrices()
        known = set(map(id, inner))
        rest = [weight for weight in head.parameters() if id(weight) not in known]
        groups = [
            {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": _DECAY},
            {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if groups:
            self._parts["adam"] = torch.optim.AdamW(groups, lr=rate, betas=_BETAS, fused=fused)
        if inner:
            self._parts["muon"] = Muon(inner, rate)

    def step(self, rate: float) -> None:
        """Update all weights at this rate, and clear their gradients."""
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    @property
    def memory(self) -> Tensors:
        """The optimiser state, under "part.number of the weight.name"."""
        return {
            f"{name}.{number}.{what}": tensor
            for name, part in self._parts.items()
            for number, kept in part.state_dict()["state"].items()
            for what, tensor in kept.items()
        }

    def restore(self, memory: Tensors) -> None:
        """Load a saved optimiser state."""
        states: dict[str, dict[int, Tensors]] = {name: {} for name in self._parts}
        for key, tensor in memory.items():
            name, number, what = key.split(".")
            states[name].setdefault(int(number), {})[what] = tensor
        for name, part in self._parts.items():
            part.load_state_dict({"state": states[name], "param_groups": part.state_dict()["param_groups"]})
