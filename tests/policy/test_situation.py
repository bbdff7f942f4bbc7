"""Decisions that hold for a few steps."""

from __future__ import annotations

from typing import Any

from slipstream.policy.record import Context, Pending, Way
from slipstream.policy.situation import Kept, Signals
from slipstream.sequence import Request, Sequence
from slipstream.types import Plan, SamplingParams

NOTHING = Signals((), ("eagle3",), 0, 0, 100)


def sequences(count: int) -> list[Sequence]:
    request = Request("one", None, [1, 2], SamplingParams(), 0)
    return [Sequence(request, number, frozenset(), 200) for number in range(count)]


def kept(who: list[Sequence], way: Way = (), in_a_row: int = 0, **signals: Any) -> Kept:
    pending = Pending(way, Context(0, 0, 0), 0, False, 1.0, 5.0, 5.0, 1.0, 0.2)
    seen = [NOTHING._replace(**signals)] * len(who)
    return Kept(who, seen, dict.fromkeys(who, Plan()), dict.fromkeys(who, pending), in_a_row)


def test_a_batch_in_which_nothing_drafts_is_not_looked_at_in_every_step() -> None:
    who = sequences(3)
    decisions = [kept(who, in_a_row=number) for number in range(1, 6)]
    assert [sum(made.holds_blindly(who) for _ in range(20)) for made in decisions] == [0, 0, 10, 10, 10]


def test_a_look_without_news_lets_it_hold_blindly_again_but_not_for_good() -> None:
    who = sequences(2)
    decision, looks = kept(who, in_a_row=9), 0
    for step in range(100):  # noqa: B007
        if decision.holds_blindly(who):
            continue
        if not decision.holds(who, decision.signals):
            break
        looks += 1
    assert (looks, step) == (2, 32)
    decision = kept(who, in_a_row=9)
    for _ in range(10):
        assert decision.holds_blindly(who)
    assert not decision.holds(who, [NOTHING._replace(match=4)] * 2), "a long match is news within 16 steps"


def test_news_that_cost_nothing_or_are_certain_are_looked_at() -> None:
    who = sequences(3)
    assert not kept(who[:1], in_a_row=9).holds_blindly(who[:1]), "a lone sequence"
    assert not kept(who, in_a_row=9).holds_blindly(who[:2]), "others"
    assert not kept(who, in_a_row=9, certain=2).holds_blindly(who), "forced text"
