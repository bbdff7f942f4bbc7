"""Muon for matrices, AdamW for everything else; the optimiser state can be saved and restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

from slipstream.drafters.heads.head import Head, Lesson, Losses
from slipstream.train.optimiser import Muon, Optimiser, flattened


class _Little(Head):
    """A map of states, a table, and a vector; the loss is given."""

    tables = ("table",)

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 4)
        self.table = nn.Parameter(torch.randn(5, 4))

    def losses(self, lesson: Lesson) -> Losses:
        raise NotImplementedError


def _learn(head: _Little, optimiser: Optimiser, steps: int) -> float:
    """Steps towards a fixed aim; returns how far away it was before the last one."""
    aims = [torch.full_like(weight, 0.3) for weight in head.parameters()]
    loss = torch.tensor(0.0)
    for _ in range(steps):
        loss = torch.stack([(w - aim).square().sum() for w, aim in zip(head.parameters(), aims, strict=True)]).sum()
        loss.backward()
        optimiser.step(0.02)
    return float(loss.detach())


@settings(deadline=None, max_examples=30)
@given(some.integers(1, 40), some.integers(1, 40), some.integers(0, 1000))
def test_flattened_matrices_keep_their_directions_and_lose_their_lengths(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrix = torch.randn(rows, columns)
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    other = 100 * torch.randn(rows, columns)  # is flattened beside it, and changes nothing
    turned = left.T @ flattened(torch.stack([matrix, other]))[0] @ right.T  # in the matrix's own directions
    off = turned - torch.diag(turned.diagonal())
    assert off.abs().max() < 1e-3
    loud = lengths > 0.05 * lengths.max()  # five rounds do not reach those that were nearly nothing
    assert turned.diagonal()[loud].min() > 0.5
    assert turned.diagonal().max() < 1.3


def test_a_step_along_a_matrix_is_as_long_as_one_of_adamw() -> None:
    weight = torch.zeros(96, 32, requires_grad=True)
    weight.grad = 1e-4 * torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    Muon([weight], 0.5).step()
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.5 * 0.2, rel=0.25)


def test_matrices_that_move_together_move_as_they_would_alone() -> None:
    """Of several shapes, with and without a gradient, and with momentum of steps before."""
    torch.manual_seed(0)
    shapes = [(6, 4), (4, 6), (6, 4), (6, 4), (3, 3)]
    starts, first, second = ([torch.randn(shape) for shape in shapes] for _ in range(3))
    together, alone = ([start.clone().requires_grad_() for start in starts] for _ in range(2))
    lone = [Muon([weight], 0.1) for weight in alone]
    every = Muon(together, 0.1)
    for gradients in (first, second):
        for number, gradient in enumerate(gradients):
            for weight in (together[number], alone[number]):
                weight.grad = None if number == 3 and gradients is second else gradient.clone()
        every.step()
        for optimiser in lone:
            optimiser.step()
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert not torch.allclose(together[0], starts[0], atol=1e-3)


def test_maps_of_states_go_by_muon_and_the_rest_by_adamw() -> None:
    head = _Little()
    optimiser = Optimiser(head, 0.02, fused=False)
    _learn(head, optimiser, 1)
    kinds = {key.rpartition(".")[2] for key in optimiser.memory if key.startswith("muon")}
    assert kinds == {"momentum"}
    adam = [tensor.shape for key, tensor in optimiser.memory.items() if key.endswith("exp_avg")]
    assert sorted(adam) == [torch.Size([4]), torch.Size([5, 4])]
    assert [weight.shape for weight in head.matrices()] == [torch.Size([4, 6])]


def test_it_learns() -> None:
    head = _Little()
    first, last = (_learn(head, Optimiser(head, 0.02, fused=False), steps) for steps in (1, 200))
    assert last < 0.05 * first


def test_a_saved_state_resumes_bit_for_bit() -> None:
    straight, before, after = _Little(), _Little(), _Little()
    _learn(straight, Optimiser(straight, 0.02, fused=False), 7)
    first = Optimiser(before, 0.02, fused=False)
    _learn(before, first, 3)
    second = Optimiser(after, 0.02, fused=False)
    after.load_state_dict(before.state_dict())
    second.restore({key: tensor.clone() for key, tensor in first.memory.items()})
    _learn(after, second, 4)
    for one, other in zip(straight.parameters(), after.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_matrix_without_gradient_stays_where_it_is() -> None:
    assert torch.equal(flattened(torch.zeros(1, 3, 5)), torch.zeros(1, 3, 5))
