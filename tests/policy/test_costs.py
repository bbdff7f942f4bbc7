"""Costs follow measurements, survive a busy machine, and start from a shape."""

from __future__ import annotations

import random

import pytest

from slipstream.policy.costs import DraftCosts, PassCosts, pass_shape


def linear(rows: int) -> float:
    return 1.0 + 0.1 * (rows - 1)


def test_one_measurement_scales_the_whole_shape() -> None:
    costs = PassCosts(linear)
    costs.curve(1, 10).add(1, 20.0)
    assert costs.curve(1, 10)[1] == pytest.approx(20.0)
    assert costs.curve(1, 10)[11] == pytest.approx(40.0)


def test_medians_survive_single_slow_steps() -> None:
    costs, chooser = PassCosts(linear), random.Random(0)
    for _ in range(40):
        costs.curve(1, 10).add(4, 13.0 * (10 if chooser.random() < 0.2 else 1))
    assert costs.curve(1, 10)[4] == pytest.approx(13.0)


def test_a_staircase_is_learnt_and_cost_never_falls_with_rows() -> None:
    costs = PassCosts(linear)
    for rows in range(1, 33):
        for _ in range(9):
            costs.curve(1, 10).add(rows, 10.0 if rows <= 16 else 18.0)
    curve = costs.curve(1, 10)
    assert (curve[8], curve[16], curve[17]) == pytest.approx((10.0, 10.0, 18.0))
    assert all(curve[rows] <= curve[rows + 1] for rows in range(1, 400))


def test_a_new_context_starts_from_the_nearest_one_and_then_has_its_own() -> None:
    costs = PassCosts(linear)
    for _ in range(9):
        costs.curve(1, 100).add(1, 10.0)
    far = costs.curve(1, 5000)
    assert far[1] == pytest.approx(10.0)
    for _ in range(9):
        far.add(1, 14.0)
    assert (costs.curve(1, 5000)[1], costs.curve(1, 100)[1]) == pytest.approx((14.0, 10.0))


def test_a_machine_that_becomes_slower_is_followed() -> None:
    curve = PassCosts(linear).curve(1, 10)
    for ms in [10.0] * 20 + [30.0] * 9:
        curve.add(1, ms)
    assert curve[1] == pytest.approx(30.0)


def test_experts_make_rows_dear() -> None:
    dense, mixture = pass_shape(17, lambda rows: 1.0), pass_shape(17, lambda rows: 1.0 + 0.5 * (rows - 1))
    assert dense(1) == mixture(1) == 1.0
    assert mixture(4) > 2 * dense(4)


def test_costs_are_the_same_after_they_were_saved() -> None:
    costs, drafts = PassCosts(linear), DraftCosts()
    for rows in (1, 5, 9):
        costs.curve(2, 300).add(rows, 7.0 + rows)
    drafts.add("head", 1, 4, 2.5)
    drafts.add_catch_up("head", 100, 12.5)
    again, drafts_again = PassCosts(linear), DraftCosts()
    again.restore(costs.state())
    drafts_again.restore(drafts.state())
    costs.curve(2, 300).refresh()
    assert [again.curve(2, 300)[rows] for rows in range(1, 20)] == pytest.approx(
        [costs.curve(2, 300)[rows] for rows in range(1, 20)]
    )
    assert drafts_again.call("head", 3) == 2.5
    assert drafts_again.level("head") == pytest.approx(0.5)
    assert drafts_again.catch_up("head", 50) == pytest.approx(5.0)
    assert drafts_again.call("other", 1) is None
