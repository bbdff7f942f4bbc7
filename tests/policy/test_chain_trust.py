"""`suffix` on the device requests chains while they are accepted, and plain rounds while they are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.models.config import ModelConfig
from slipstream.policy.trust import ChainCost, Trust
from slipstream.types import Plan, Stats
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import tiny_llm


def after(trust: Trust, stats: Stats, rounds: int, tokens: int) -> None:
    """A burst with chains, and what it gave."""
    trust.begin(stats)
    stats.steps += rounds
    stats.emitted += tokens


def test_a_rejected_burst_asks_for_longer_matches_and_a_good_one_for_shorter() -> None:
    trust, stats = Trust(), Stats(steps=5, emitted=9)
    assert trust.ask(2, stats, 2, 0.13)
    assert not trust.ask(1, stats, 2, 0.13)
    for wanted in (2, 3, 4):
        assert trust.ask(wanted, stats, 2, 0.13)
        after(trust, stats, rounds=4, tokens=4)
        assert not trust.ask(wanted, stats, 2, 0.13)
    assert trust.ask(5, stats, 2, 0.13)
    assert not trust.proved
    after(trust, stats, rounds=4, tokens=9)
    assert trust.ask(4, stats, 2, 0.13)
    assert trust.proved
    assert not trust.ask(3, stats, 2, 0.13)
    assert not trust.proved, "what does not ask has nothing to prove"


def test_it_never_asks_for_less_than_at_first_and_never_gives_up() -> None:
    trust, stats = Trust(), Stats()
    for _ in range(5):
        assert trust.ask(3, stats, 3, 0.13)
        after(trust, stats, rounds=4, tokens=8)
    assert not trust.ask(2, stats, 3, 0.13)
    for _ in range(40):
        assert trust.ask(16, stats, 3, 0.13)
        after(trust, stats, rounds=4, tokens=4)


def test_it_keeps_to_the_shortest_match_that_was_asked_for() -> None:
    trust, stats = Trust(), Stats()
    assert trust.ask(20, stats, 20, 0.13)
    after(trust, stats, rounds=4, tokens=4)
    assert not trust.ask(19, stats, 20, 0.13)


def test_nothing_is_learnt_from_a_burst_that_another_text_asked_for() -> None:
    trust, stats = Trust(), Stats()
    assert not trust.ask(1, stats, 2, 0.13)
    after(trust, stats, rounds=4, tokens=4)
    assert trust.ask(2, stats, 2, 0.13)


def test_a_burst_is_short_until_its_chains_have_proved_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(tiny_llm(context=400, characters=True, speculate="suffix"), monkeypatch)
    burst = burst_of(llm)
    launch, seen = burst.launch, []

    def noted(sequences: Any, plan: Plan, rounds: int) -> Any:
        seen.append((plan.drafts, plan.rounds < 8, rounds))
        return launch(sequences, plan, rounds)

    monkeypatch.setattr(burst, "launch", noted)
    llm.generate([[7, 8, 9] * 12], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
    chains = [(ventures, rounds) for trees, ventures, rounds in seen if trees]
    assert chains[0] == (True, 4)
    assert {rounds for ventures, rounds in chains if ventures} == {4}
    assert max(rounds for _, rounds in chains) == 8, "a text that goes round in a loop proves its chains"


DENSE = ModelConfig("llama", 1000, 64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate_size=256, context=64)
MIXED = replace(DENSE, experts=8, experts_per_token=2, expert_size=128)


def test_a_pass_over_more_rows_reads_more_experts_and_nothing_else() -> None:
    assert DENSE.weights_read(1) == DENSE.weights_read(40) == DENSE.parameters - 1000 * 64
    expert = 3 * 64 * 128 * 4  # one of each layer
    unread = [(MIXED.parameters - 1000 * 64 - MIXED.weights_read(rows)) / expert for rows in (1, 2, 100)]
    assert unread == pytest.approx([6, 4.5, 0], abs=1e-6)


def test_chains_must_be_better_founded_where_their_rows_read_more_experts() -> None:
    trials = []
    for config, lanes in ((DENSE, 1), (MIXED, 32), (MIXED, 1), (MIXED, 32)):  # the batch around a text changes
        cost = ChainCost.of(config.weights_read(lanes), config.weights_read(17 * lanes))
        trials.append((cost.least_match(1), cost.trial_rounds))
    assert trials == [(2, 4), (2, 4), (5, 1), (2, 4)]
    assert ChainCost.of(1.0, 1.0).least_match(9) == 9, "the options' own limit holds"


def test_a_burst_must_give_what_it_costs_more() -> None:
    for worth, proved in ((0.13, True), (1.2, True), (1.3, False)):
        trust, stats = Trust(), Stats()
        assert trust.ask(4, stats, 2, worth)
        after(trust, stats, rounds=4, tokens=9)
        trust.ask(4, stats, 2, worth)
        assert trust.proved == proved
