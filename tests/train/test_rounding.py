"""A training ends with quantized weights, which improves those of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.drafters.heads.head import Head, Lesson, Losses
from slipstream.drafters.heads.weight_codec import packed, rounded, unpacked
from slipstream.train.run import learned_class, train
from slipstream.train.trainer import ProgressSink, as_stored
from tests.chats import order


@pytest.mark.parametrize("columns", [48, 30])
def test_a_rounded_matrix_is_what_comes_back_from_a_file(columns: int) -> None:
    weight = torch.randn(20, columns, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded([weight])[0], unpacked(packed({"a": weight}, 6))["a"])


def test_gradients_are_those_at_the_rounded_weights_and_move_the_exact_ones() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(5, 8)
    others = [nn.Parameter(torch.randn(rows, columns)) for rows, columns in ((3, 8), (3, 5), (2, 8))]
    exact = layer.weight.detach().clone()
    with as_stored([others[0], layer.weight, *others[1:]]):
        assert all(torch.allclose(other, rounded([other])[0], rtol=1e-5) for other in others)
        assert torch.equal(layer.weight, rounded([exact])[0]) and not torch.equal(layer.weight, exact)
        layer(x).square().sum().backward()
    assert torch.equal(layer.weight, exact)
    wanted = 2 * (x @ rounded([exact])[0].T).T @ x
    assert layer.weight.grad is not None and torch.allclose(layer.weight.grad, wanted, rtol=1e-4)


def test_exact_weights_come_back_from_an_error() -> None:
    layer = nn.Linear(8, 4, bias=False)
    exact = layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), as_stored([layer.weight]):
        _ = 1 / 0
    assert torch.equal(layer.weight, exact)


def test_matrices_are_rounded_together_as_each_alone() -> None:
    """One of them has numbers much larger than the rest, and eight bits."""
    torch.manual_seed(0)
    spread, spiked = torch.randn(20, 48), 0.01 * torch.randn(48, 48) + torch.eye(48)
    together = rounded([spread, spiked, spread[:3]])
    assert all(torch.equal(a, rounded([b])[0]) for a, b in zip(together, (spread, spiked, spread[:3]), strict=True))
    assert all(
        torch.equal(a, unpacked(packed({"a": b}, 6))["a"]) for a, b in zip(together, (spread, spiked), strict=False)
    )


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_the_last_fifth_of_a_training_is_spent_on_rounded_weights(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the file will have in 6 bits, on the way there and on the way back."""
    there, back = list[bool](), list[bool]()
    kind = learned_class(method).head_type
    learn = kind.losses

    def as_in_a_file(head: Head) -> bool:
        weights = [weight for weight in head.parameters() if weight.ndim == 2]
        return all(torch.allclose(w, rounded([w])[0], rtol=1e-5, atol=1e-8) for w in weights)

    def losses(head: Head, lesson: Lesson) -> Losses:
        there.append(as_in_a_file(head))
        found = learn(head, lesson)
        found.total.register_hook(lambda gradient: back.append(as_in_a_file(head)))
        return found

    monkeypatch.setattr(kind, "losses", losses)
    settings = {"draft_model": {"layers": 1}, "eagle3": {"unroll": 2, "own_rows": True}, "medusa": {"heads": 2}}
    asked = order(method, tmp_path / "out", {"steps": 20, "evaluate": 20}, settings=settings[method])
    train(asked, ProgressSink())
    assert there == back == [False] * 16 + [True] * 4


def _stored_loss(rounded_from: int) -> float:
    """Of a map in 6 bits that has learnt another one for 400 steps, the last ones rounded."""
    torch.manual_seed(0)
    # Inputs that go together: what one weight rounds off, others can mend.
    x = torch.randn(256, 16) @ torch.randn(16, 64) + 0.1 * torch.randn(256, 64)
    wanted, layer = x @ torch.randn(64, 16), nn.Linear(64, 16, bias=False)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    for step in range(400):
        optimiser.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
        optimiser.zero_grad()
        with as_stored([layer.weight] if step >= rounded_from else []):
            (layer(x) - wanted).square().mean().backward()
        optimiser.step()
    with as_stored([layer.weight]), torch.no_grad():
        return float((layer(x) - wanted).square().mean())


def test_rounding_in_the_end_makes_up_for_what_is_rounded_off() -> None:
    assert _stored_loss(320) < 0.96 * _stored_loss(400)
