"""Fused operations: what they give, and their gradients, are those of the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slipstream.gpu.fused import cross_entropy, gated, rotated
from tests.interpreted import DEVICE


@pytest.mark.kernels
def test_the_kernels_compute_what_the_plain_operations_do() -> None:
    from slipstream.gpu.kernels import fused_kernels as kernels

    torch.manual_seed(0)

    def near(found, expected, kind):
        bound = {torch.float32: 1e-5, torch.float16: 2e-3}[kind]
        assert found.dtype == kind and (found.float() - expected.float()).abs().max() <= bound * expected.abs().max()

    for rows, width, kind in ((1, 64, torch.float32), (5, 96, torch.float16), (7, 2080, torch.float32)):
        x = (3 * torch.randn(rows, width, device=DEVICE)).to(kind)
        wide = x.float()
        near(kernels.unit_norm(x, 0.5, kind), wide / (wide.square().sum(-1, keepdim=True) + 0.25).sqrt(), kind)
        period = max(1, rows // 2)
        turns = torch.polar(torch.ones(()), 6 * torch.rand(period, width // 2)).to(DEVICE)
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        every = turns[torch.arange(rows, device=DEVICE) % period]
        near(kernels.rotate(x, turns, torch.empty_like(x)), torch.view_as_real(pairs * every).flatten(1), kind)
        back = kernels.rotate(x, turns, torch.empty_like(x), back=True)
        near(back, torch.view_as_real(pairs * every.conj()).flatten(1), kind)
        own = x.clone()
        assert kernels.rotate(own, turns, own).equal(kernels.rotate(x, turns, torch.empty_like(x)))

        both = wide.clone().requires_grad_()
        product = functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]
        slope = torch.randn_like(product).to(kind)
        product.backward(slope.float())
        near(kernels.gate(x), product.detach(), kind)
        near(kernels.gate_back(x, slope), both.grad, kind)

    for rows, tokens, kind in ((3, 100, torch.float32), (2, 5000, torch.float16), (2, 4096, torch.float32)):
        logits = (2 * torch.randn(rows, tokens, device=DEVICE)).to(kind)
        shares = (0.9 * torch.softmax(2 * torch.randn(rows, tokens, device=DEVICE), -1)).to(kind)
        wide = logits.float().requires_grad_()
        expected = -(functional.log_softmax(wide, -1) * shares.float()).sum(-1)
        slopes = torch.rand(rows, device=DEVICE)
        expected.backward(slopes)
        losses, facts = kernels.cross_entropy(logits, shares)
        near(losses, expected.detach(), torch.float32)
        near(kernels.cross_entropy_back(logits, shares, slopes, facts), wide.grad, kind)


def test_turning_multiplies_adjacent_pairs() -> None:
    x, turns = torch.randn(2, 3, 8), torch.polar(torch.ones(()), torch.rand(3, 4))
    expected = torch.complex(x[..., ::2], x[..., 1::2]) * turns
    found = rotated(x, turns)
    assert torch.allclose(found[..., ::2], expected.real) and torch.allclose(found[..., 1::2], expected.imag)


def test_the_first_half_gates_the_second() -> None:
    x = torch.randn(2, 3, 8)
    assert torch.equal(gated(x), functional.silu(x[..., :4]) * x[..., 4:])


def test_what_lies_outside_the_draft_vocabulary_is_left_out_of_the_loss() -> None:
    logits, share = torch.randn(5, 7), torch.softmax(torch.randn(5, 9), -1)[:, :7]
    assert torch.allclose(cross_entropy(logits, share), -(torch.log_softmax(logits, -1) * share).sum(-1))
