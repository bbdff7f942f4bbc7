"""The best way to draft and the best number of nodes, by tokens per millisecond."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.policy.choice import MIN_GAIN, Estimate, best_count, choose, short_try


class Straight:
    """A pass of 10 ms and so many per row."""

    def __init__(self, per_row: float) -> None:
        self.per_row = per_row

    def __getitem__(self, rows: int) -> float:
        return 10.0 + self.per_row * (rows - 1)


PLAIN = Estimate(bonus=MIN_GAIN)
MODEL = Estimate(("head",), "head", accepted=2.0, nodes=8.0)
MATCH = Estimate(("match",), None, accepted=1.0, nodes=4.0)


def drafters(offers: list[list[Estimate]], per_row: float, call_ms: float, **how: bool) -> list[tuple[str, ...]]:
    return [pick.drafters for pick in choose(offers, Straight(per_row), {"head": call_ms}, **how).picks]


def test_a_lone_sequence_takes_the_fastest() -> None:
    assert drafters([[PLAIN, MODEL, MATCH]], 0.4, 1.0) == [("head",)]
    assert drafters([[PLAIN, MODEL, MATCH]], 0.4, 15.0) == [("match",)]
    assert drafters([[PLAIN, MODEL, MATCH]], 5.0, 1.0) == [()]


def test_a_gain_of_one_percent_is_not_worth_beginning() -> None:
    slight = Estimate(("match",), None, accepted=0.05, nodes=1.0)
    assert drafters([[PLAIN, slight]], 0.4, 0.0) == [()]
    assert drafters([[Estimate(), slight]], 0.4, 0.0) == [("match",)], "who drafts already goes on"


def test_a_call_that_one_of_eight_would_not_pay_for_is_paid_by_all() -> None:
    rich = [PLAIN, Estimate(("head",), "head", accepted=2.0, nodes=4.0)]
    assert drafters([rich, *[[PLAIN]] * 7], 0.1, 5.0) == [()] * 8
    assert drafters([rich] * 8, 0.1, 5.0) == [("head",)] * 8


def test_sequences_for_which_it_does_not_pay_stay_plain_beside_others() -> None:
    poor = [PLAIN, Estimate(("head",), "head", accepted=0.05, nodes=8.0)]
    rich = [PLAIN, Estimate(("head",), "head", accepted=4.0, nodes=8.0)]
    assert drafters([rich, poor, rich], 0.4, 1.0) == [("head",), (), ("head",)]


def test_rows_of_a_large_batch_are_too_dear() -> None:
    assert drafters([[PLAIN, MODEL]] * 32, 2.0, 1.0) == [()] * 32


@given(
    st.lists(st.floats(0.0, 1.0), max_size=20),
    st.integers(1, 4),
    st.lists(st.floats(0.0, 3.0), min_size=30, max_size=30),
    st.floats(0.0, 5.0),
)
def test_the_number_of_nodes_is_the_global_best_over_any_staircase(
    found: list[float], sequences: int, steps: list[float], drafted_ms: float
) -> None:
    survivals = sorted(found, reverse=True)
    cost = [5.0, *itertools.accumulate(steps, initial=5.0)]

    def rate(count: int) -> float:
        return (sequences + sum(survivals[:count])) / (drafted_ms + cost[sequences + count])

    best = best_count(survivals, sequences, cost, drafted_ms)
    assert rate(best) == pytest.approx(max(rate(count) for count in range(len(survivals) + 1)))


def test_throughput_gives_the_rows_to_the_requests_that_gain_most() -> None:
    sure = [PLAIN, Estimate(("match",), None, accepted=6.0, nodes=6.0)]
    doubtful = [PLAIN, Estimate(("match",), None, accepted=0.6, nodes=3.0)]
    cost_of_a_row = 1.2
    fair = drafters([sure, doubtful], cost_of_a_row, 0.0)
    together = drafters([sure, doubtful], cost_of_a_row, 0.0, throughput=True)
    assert together == [("match",), ()]
    assert fair[0] == ("match",)


def test_the_score_is_the_logarithm_of_the_speed() -> None:
    choice = choose([[MODEL]], Straight(0.4), {"head": 1.0})
    assert choice.score == pytest.approx(math.log(choice.tokens / choice.ms))


def test_a_short_try_has_one_node_and_promises_less_than_one_token() -> None:
    whole = Estimate(("head",), "head", accepted=3.0, nodes=12.0, own_ms=0.5)
    short = short_try(whole)
    assert (short.nodes, short.own_ms, short.short) == (1.0, 0.5, True)
    assert short.accepted == pytest.approx(0.75), "of a chain that goes on with a probability of 3/4"


def test_what_pays_for_all_together_is_found_though_no_sequence_would_begin_alone() -> None:
    """Eight plain roots take 12 ms; with drafts 30 ms, for 3.6 times the tokens."""
    offers = [[PLAIN, Estimate(("head",), "head", accepted=2.6, nodes=7.0)]] * 8
    assert drafters(offers, 0.3, 1.4) == [("head",)] * 8
    assert drafters(offers, 0.3, 1.4, throughput=True) == [("head",)] * 8
    assert drafters(offers, 2.5, 1.4) == [()] * 8
