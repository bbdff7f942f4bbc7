"""Ways that are not chosen are tried: soon after a success, seldom after failures, never for much of the time."""

from __future__ import annotations

from itertools import pairwise

from slipstream.policy.probes import Probes

WAY = ("head",)


def tries(lost_ms: float, all_ms: float, steps: int = 400) -> list[int]:
    """The steps in which a way is tried that loses so much each time."""
    probes, found = Probes(), []
    for step in range(steps):
        probes.next_step()
        if probes.due(WAY, lost_ms, all_ms):
            probes.begin(WAY)
            probes.ended(WAY, lost_ms)
            found.append(step)
    return found


def test_what_does_not_pay_is_tried_more_and_more_seldom_and_never_given_up() -> None:
    found = tries(1.0, 1e9)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert gaps[:3] == [16, 32, 32]
    assert set(gaps[1:]) == {32}


def test_what_pays_is_tried_again_soon() -> None:
    found = tries(-1.0, 1e9)
    assert {later - earlier for earlier, later in pairwise(found)} == {8}


def test_the_time_that_tries_may_lose_is_bounded() -> None:
    assert len(tries(1.0, 700.0)) == 3


def test_a_success_ends_the_long_wait() -> None:
    probes = Probes()
    for lost in (5.0, 5.0, 5.0, -1.0):
        probes.ended(WAY, lost)
    probes.begin(WAY)
    waited = 0
    while not probes.due(WAY, 0.0, 1e5):
        probes.next_step()
        waited += 1
    assert waited == 8


def test_all_ways_together_lose_no_more_than_one_part_in_a_hundred() -> None:
    probes, lost = Probes(), 0.0
    for _ in range(400):
        probes.next_step()
        for way in (("a",), ("b",), ("c",), ("d",)):
            if probes.due(way, 1.0, 1000.0):
                probes.begin(way)
                probes.ended(way, 1.0)
                lost += 1.0
    assert lost == 10.0
