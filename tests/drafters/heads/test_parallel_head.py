"""The head of `parallel` with injected K/V and a confidence output: what learns from what, and what it sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.drafters.heads.objectives import OBJECTIVES
from slipstream.drafters.heads.parallel_head import ParallelSettings, _spread, sharpness
from slipstream.errors import OptionError
from tests.drafters.heads.test_parallel import GROWN, TAUGHT, fresh, lesson_of, linked_lesson, parts, speaking
from tests.heads import random_head


def totals(seed: int = 1, **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a fresh head, and the gradients of its weights."""
    head = fresh(vocabulary=20, block=4, rank=16, **settings)
    torch.manual_seed(seed)
    total = head.losses(linked_lesson(head)).total
    total.backward()  # type: ignore[no-untyped-call]
    slopes = {name: weight.grad for name, weight in head.named_parameters() if weight.grad is not None}
    return float(total.detach()), slopes


def test_nothing_but_the_confidence_output_learns_from_its_loss() -> None:
    (without, slopes), (with_it, others) = totals(inject=True), totals(inject=True, confidence=True)
    assert with_it > without and others.pop("sure").any()
    assert slopes.keys() == others.keys()
    assert all(torch.equal(slopes[name], others[name]) for name in slopes)


def test_the_confidence_output_learns_how_often_the_first_choice_is_right() -> None:
    """Rows whose first choice is certain become sharper, those whose first choice is any of two do not."""
    head = fresh(vocabulary=20, confidence=True)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, head.frame.config.hidden_size, generator=generator)
    sure = torch.arange(400) % 2 == 0
    hidden[:, 0] = sure.float() * 2 - 1
    logits = torch.zeros(400, 20)
    logits[:, 3] = logits[:, 4] = 1.0
    logits[sure, 4] = 0.0
    best = torch.where(sure, 3, 3 + (torch.arange(400) // 2 % 2))
    optimiser = torch.optim.Adam([head.sure], lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        head._unsure(hidden, logits, best).mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    with torch.no_grad():
        factors = sharpness(hidden, head.sure)[:, 0]
        chances = torch.softmax(factors[:, None] * logits, -1)
    assert chances[sure, 3].mean() > 0.25 > torch.softmax(logits[0], -1)[3]
    assert abs(float(chances[~sure, 3].mean()) - 0.5) < 0.2
    assert not head._unsure(hidden, logits, torch.full((400,), -1)).any(), "no token of the vocabulary is no lesson"


def test_every_weight_of_a_grown_head_learns() -> None:
    head = fresh(vocabulary=20, **GROWN)
    lesson = linked_lesson(head)
    generator = torch.Generator().manual_seed(1)
    lesson.taps.update({layer: torch.randn(x.shape, generator=generator) for layer, x in lesson.taps.items()})
    head.losses(lesson).total.backward()  # type: ignore[no-untyped-call]
    assert not {name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()}


def test_a_block_sees_of_the_text_what_the_target_knew_before_its_root() -> None:
    """A hidden state at the root or after it changes nothing; one before it does."""
    llm = speaking(random_head("parallel", stirred=0.1, **GROWN))
    _, head = parts(llm)
    lesson, anchors = lesson_of(llm, head, [TAUGHT[0] * 5]), torch.tensor([4, 11])
    with torch.no_grad():
        _, before = head.blocks(lesson, anchors)
        for place, changed in ((2, [True, True]), (4, [False, True]), (11, [False, False])):
            kept = {layer: hidden.clone() for layer, hidden in lesson.taps.items()}
            for hidden in lesson.taps.values():
                hidden[:, place] += 1.0
            _, after = head.blocks(lesson, anchors)
            assert [bool((before - after)[0, block].abs().amax() > 1e-4) for block in range(2)] == changed, place
            lesson.taps.update(kept)


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_the_loss_is_the_one_that_was_chosen(loss: str) -> None:
    found, _ = totals(loss=loss)
    others = {name: totals(loss=name)[0] for name in OBJECTIVES}
    assert found == others.pop(loss) and found not in others.values()


def test_layers_that_are_read_are_spread_evenly() -> None:
    assert _spread(30) == (2, 8, 14, 21, 27)
    assert _spread(2) == (0, 1) and _spread(1) == (0,)
    assert len(_spread(12)) == 5
    assert fresh(taps=(1,)).taps == (1,)


@pytest.mark.parametrize("bad", [{"reach": -1}, {"loss": "best"}, {"block": 0}])
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        ParallelSettings(**bad)


def test_layers_that_the_target_has_not_are_refused() -> None:
    with pytest.raises(OptionError, match="taps"):
        fresh(taps=(0, 7))
