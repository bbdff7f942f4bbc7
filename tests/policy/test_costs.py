"""Costs follow measurements, survive a busy machine, and start from a shape."""

from __future__ import annotations

import random

import pytest

from slipstream.policy.costs import DraftCosts, PassCosts, pass_shape


def linear(rows: int) -> float:
    return 1.0 + 0.1 * (rows - 1)


def test_one_measurement_scales_the_whole_shape() -> None:
    costs = PassCosts(linear)
    costs.add(1, 10, 1, 20.0)
    assert costs.curve(1, 10)[1] == pytest.approx(20.0)
    assert costs.curve(1, 10)[11] == pytest.approx(40.0)


def test_medians_survive_single_slow_steps() -> None:
    costs, chooser = PassCosts(linear), random.Random(0)
    for _ in range(40):
        costs.add(1, 10, 4, 13.0 * (10 if chooser.random() < 0.2 else 1))
    assert costs.curve(1, 10)[4] == pytest.approx(13.0)


def test_a_busy_moment_in_small_passes_does_not_make_larger_ones_dear() -> None:
    """Those are then chosen again, and measured."""
    costs = PassCosts(linear)
    for rows, ms in ((1, 10.0), (4, 60.0), (8, 17.0), (12, 45.0), (16, 25.0)):
        for _ in range(3):
            costs.add(1, 10, rows, ms)
    found = [costs.curve(1, 10)[rows] for rows in (1, 4, 8, 12, 16)]
    assert found == pytest.approx([10.0, 17.0, 17.0, 25.0, 25.0], rel=0.05)


def test_a_staircase_is_learnt_and_cost_never_falls_with_rows() -> None:
    costs = PassCosts(linear)
    for rows in range(1, 33):
        for _ in range(9):
            costs.add(1, 10, rows, 10.0 if rows <= 16 else 18.0)
    curve = costs.curve(1, 10)
    assert (curve[8], curve[16], curve[17]) == pytest.approx((10.0, 10.0, 18.0))
    assert all(curve[rows] <= curve[rows + 1] for rows in range(1, 400))


def test_a_new_context_starts_from_the_nearest_one_and_then_has_its_own() -> None:
    costs = PassCosts(linear)
    for _ in range(9):
        costs.add(1, 100, 1, 10.0)
    assert costs.curve(1, 5000)[1] == pytest.approx(10.0)
    for _ in range(9):
        costs.add(1, 5000, 1, 14.0)
    assert (costs.curve(1, 5000)[1], costs.curve(1, 100)[1]) == pytest.approx((14.0, 10.0))


def test_a_machine_that_becomes_slower_is_followed() -> None:
    costs = PassCosts(linear)
    for ms in [10.0] * 20 + [30.0] * 9:
        costs.add(1, 10, 1, ms)
    assert costs.pace * costs.curve(1, 10)[1] == pytest.approx(30.0)


@pytest.mark.parametrize("slower", [1 / 3, 3.0])
def test_costs_of_different_times_are_compared_at_one_pace(slower: float) -> None:
    """Plain passes were measured long ago, at another load: drafts look neither cheaper nor dearer for that."""
    costs, chooser = PassCosts(linear), random.Random(1)
    for _ in range(9):
        costs.add(1, 10, 1, 10.0 * chooser.uniform(0.9, 1.3))
        costs.add(1, 10, 9, 16.0 * chooser.uniform(0.9, 1.3))
    for _ in range(60):
        costs.add(1, 10, 9, slower * 16.0 * chooser.uniform(0.9, 1.3))
    curve = costs.curve(1, 10)
    assert curve[9] / curve[1] == pytest.approx(1.6, rel=0.15)
    assert costs.pace * curve[1] == pytest.approx(slower * 11.0, rel=0.15)


def test_a_wrong_cost_is_corrected_by_measuring_now_and_then() -> None:
    """Plain passes were measured in a bad moment; one in 30 is enough to find out."""
    costs, chooser = PassCosts(linear), random.Random(2)
    for _ in range(3):
        costs.add(1, 10, 1, 25.0)
        costs.add(1, 10, 9, 16.0)
    for step in range(300):
        rows, ms = (1, 10.0) if step % 30 == 0 else (9, 16.0)
        costs.add(1, 10, rows, ms * chooser.uniform(0.9, 1.3))
    curve = costs.curve(1, 10)
    assert curve[9] / curve[1] == pytest.approx(1.6, rel=0.15)


def test_experts_make_rows_dear() -> None:
    dense, mixture = pass_shape(17, lambda rows: 1.0), pass_shape(17, lambda rows: 1.0 + 0.5 * (rows - 1))
    assert dense(1) == mixture(1) == 1.0
    assert mixture(4) > 2 * dense(4)


def test_costs_are_the_same_after_they_were_saved() -> None:
    costs, drafts = PassCosts(linear), DraftCosts()
    for rows in (1, 5, 9):
        costs.add(2, 300, rows, 7.0 + rows)
    drafts.add("head", 1, 4, 2.5)
    drafts.add_catch_up("head", 100, 12.5)
    again, drafts_again = PassCosts(linear), DraftCosts()
    again.restore(costs.state())
    drafts_again.restore(drafts.state(), doubted=False)
    costs.curve(2, 300).refresh()
    assert [again.curve(2, 300)[rows] for rows in range(1, 20)] == pytest.approx(
        [costs.curve(2, 300)[rows] for rows in range(1, 20)]
    )
    assert drafts_again.call("head", 3, 0.1) == 2.5
    assert drafts_again.level("head", 3) == pytest.approx(0.5)
    assert drafts_again.catch_up("head", 50, 0.0) == pytest.approx(5.0)
    assert drafts_again.call("other", 1, 0.7) == 0.7
    doubted = DraftCosts()
    doubted.restore(drafts.state())
    assert doubted.call("head", 1, 0.1) == pytest.approx(0.5), "it may have been a bad hour"
    doubted.add("head", 1, 4, 1.1)
    assert doubted.call("head", 1, 0.1) == pytest.approx(1.1)


def test_a_first_call_in_a_bad_moment_does_not_rule_a_drafter_out() -> None:
    drafts = DraftCosts()
    drafts.add("head", 1, 4, 160.0)
    assert drafts.call("head", 1, 2.5) == pytest.approx(20.0)
    for _ in range(4):
        drafts.add("head", 1, 4, 2.0)
    assert drafts.call("head", 1, 2.5) == pytest.approx(2.0)
