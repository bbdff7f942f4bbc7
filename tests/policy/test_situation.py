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


def kept(who: list[Sequence], way: Way = (), before: int = 0, **signals: Any) -> Kept:
    pending = Pending(way, Context(0, 0, 0), 0, False, 1.0, 5.0, 5.0, 1.0, 0.2)
    seen = [NOTHING._replace(**signals)] * len(who)
    return Kept(who, seen, dict.fromkeys(who, Plan()), dict.fromkeys(who, pending), before)


def test_a_batch_in_which_nothing_drafts_is_not_looked_at_in_every_step() -> None:
    who = sequences(3)
    counts = []
    before = 0
    for _ in range(5):
        decision = kept(who, before=before)
        before = decision.plain_in_a_row
        counts.append(sum(decision.holds_blindly(who) for _ in range(20)))
    assert counts == [0, 0, 6, 6, 6]
    assert kept(who, ("suffix",), before).plain_in_a_row == 0


def test_news_that_cost_nothing_or_are_certain_are_looked_at() -> None:
    who = sequences(3)
    assert not kept(who[:1], before=9).holds_blindly(who[:1]), "a lone sequence"
    assert not kept(who, before=9).holds_blindly(who[:2]), "others"
    assert not kept(who, before=9, certain=2).holds_blindly(who), "forced text"
