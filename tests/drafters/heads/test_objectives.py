"""The losses of heads: written out by hand, their gradients, and what they are good for."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.drafters.heads.objectives import OBJECTIVES, overlap

P = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.9, 0.05], [0.2, 0.1, 0.0]])  # of the last row most is on other tokens
LOGITS = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.5, 0.0], [1.0, 1.0, 1.0]])


def by_hand(name: str, logits: list[float], p: list[float]) -> float:
    total = sum(math.exp(x) for x in logits)
    q = [math.exp(x) / total for x in logits]
    entropy = -sum(a * math.log(b) for a, b in zip(p, q, strict=True))
    shared = sum(map(min, p, q))
    weight = math.exp(-3 * shared)
    return {
        "cross_entropy": entropy,
        "tv": 1 - shared,
        "mixed": 0.1 * entropy + 0.9 * 2 * (1 - shared),
        "lk": weight * entropy + (1 - weight) * (1 - shared),
    }[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_is_what_its_definition_says(name: str) -> None:
    losses = OBJECTIVES[name](LOGITS, P)
    wanted = [by_hand(name, row, p) for row, p in zip(LOGITS.tolist(), P.tolist(), strict=True)]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert OBJECTIVES[name](LOGITS.bfloat16(), P.bfloat16()).dtype == torch.float32


def test_the_overlap_is_how_often_a_draw_from_q_is_accepted() -> None:
    """Speculative sampling accepts x from q with probability min(1, p(x) / q(x))."""
    q = torch.softmax(LOGITS, -1)
    accepted = (q * (P / q).clamp_max(1.0)).sum(-1)
    assert torch.allclose(overlap(LOGITS, P), accepted)


def test_the_weight_of_lk_is_no_way_to_lower_the_loss() -> None:
    """Its gradient is that of both parts at the weight as it is."""
    logits = LOGITS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(OBJECTIVES["lk"](logits, P).sum(), logits)
    weight = torch.exp(-3 * overlap(LOGITS, P))[:, None]
    parts = []
    for name in ("cross_entropy", "tv"):
        other = LOGITS.clone().requires_grad_()
        parts += torch.autograd.grad(OBJECTIVES[name](other, P).sum(), other)
    assert torch.allclose(slope, weight * parts[0] + (1 - weight) * parts[1], atol=1e-6)


@pytest.mark.parametrize("name", ["tv", "mixed", "lk"])
def test_a_head_that_cannot_be_right_overlaps_more_by_the_other_losses(name: str) -> None:
    """One row of logits for two different targets: cross-entropy ends at their mean, which is not the best overlap."""
    both = torch.tensor([[0.9, 0.05, 0.05], [0.9, 0.05, 0.05], [0.02, 0.49, 0.49]])

    def learnt(kind: str) -> torch.Tensor:
        logits = torch.zeros(3, requires_grad=True)
        optimiser = torch.optim.Adam([logits], lr=0.02)
        for _ in range(600):
            optimiser.zero_grad()
            OBJECTIVES[kind](logits.expand(3, -1), both).mean().backward()
            optimiser.step()
        return overlap(logits.detach().expand(3, -1), both).mean()

    assert learnt(name) > learnt("cross_entropy") + 0.01
