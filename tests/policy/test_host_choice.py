"""The policy over steps of known costs and gains: it learns from tries, and is not slower than plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slipstream.policy import Progress, Report, auto
from slipstream.policy.choice import STICKY
from slipstream.policy.costs import DraftCosts
from slipstream.policy.knowledge import Knowledge
from slipstream.policy.lessons import lost_by_try
from slipstream.policy.record import Context, Pending, record_of
from slipstream.policy.trust import Signal
from slipstream.sequence import Sequence
from slipstream.types import Limits
from tests.policy.virtual_host import VirtualHost, VirtualPart, drafted, some_sequences, straight

BATCH = 8
DEAR_ROWS = straight(11.0, 1.2)


def test_a_try_in_a_batch_verifies_a_node_and_is_learnt_from() -> None:
    """Rows are too dear for the draft to be chosen; what is tried is verified all the same."""
    host = VirtualHost(VirtualPart("head", rate=0.3, sure=0.05), pass_ms=DEAR_ROWS)
    decisions = host.run(some_sequences(BATCH), 1500)
    tries = [made for made in decisions if made.probe and made.drafters]
    assert len(tries) >= 5
    assert all(made.nodes == 1 for made in tries)


def test_a_try_that_drafted_nothing_is_no_failure() -> None:
    host = VirtualHost(VirtualPart("head", rate=0.9, depth=0), pass_ms=DEAR_ROWS)
    sequences = some_sequences(BATCH)
    host.run(sequences, 600)
    assert not host.policy.known.record.ways()
    guess = (1.5, 8.0)
    assert all(record_of(s).mean(("head",), 0, guess) == guess for s in sequences)


def test_of_a_free_try_that_was_cut_to_one_node_all_that_it_would_bring_is_learnt() -> None:
    """One node accepted of a chain that usually brings many is no proof that it brings one."""
    part = VirtualPart("match", rate=0.97, sure=0.1, level_ms=0.0, match=1)
    host = VirtualHost(part, pass_ms=straight(11.0, 3.0))
    sequences = some_sequences(BATCH)
    tries = [made for made in host.run(sequences, 3000) if made.probe and made.drafters]
    assert tries and max(made.nodes for made in tries) == 1
    assert host.policy.known.record.ways() == set(), "the record of all requests has whole drafts alone"


@pytest.mark.parametrize("others", [{"drafter": "none"}, {"limits": Limits(clock=False)}])
def test_a_request_drafts_beside_others_that_are_not_decided_with_it(others: dict[str, Any]) -> None:
    """Their rows are in the pass that it decides about."""
    host = VirtualHost(VirtualPart("head", rate=0.9), pass_ms=straight(10.0, 0.1))
    (sequence,) = some_sequences(1)
    host.run([sequence, *some_sequences(3, **others)], 200)
    assert drafted(sequence.stats.decisions) > 150


def test_a_try_is_judged_by_what_its_own_sequence_would_have_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences one has a match, and is right; the other has none, and tries a head now and then."""

    class OfOne(VirtualPart):
        def signal(self, sequence: Sequence) -> Signal:
            return Signal(9 if sequence is right else 0, 1)

    judged: list[tuple[bool, float]] = []

    def noted(item: Progress, report: Report, pending: Pending, known: Knowledge) -> float:
        if not record_of(item.sequence).way:
            judged.append((item.sequence is right, pending.chosen_tokens))
        return lost_by_try(item, report, pending, known)

    monkeypatch.setattr(auto, "lost_by_try", noted)
    right, wrong = some_sequences(2)
    match, head = OfOne("match", rate=0.95, level_ms=0.0, match=9), VirtualPart("head", level_ms=3.0)
    host = VirtualHost(match, head, pass_ms=straight(10.0, 0.3))
    host.run([right, wrong], 2000)
    assert drafted(right.stats.decisions) > 1000
    assert (False, 1.0) in judged and {tokens for _, tokens in judged} == {1.0}, "plain decoding brings one token"


def test_a_bound_that_nothing_was_measured_for_is_not_kept() -> None:
    """Without the clock and without saved costs: a pass of 13 ms may be one of 1 ms."""
    limits = {bound: Limits(clock=False, max_tpot_ms=bound) for bound in (5.0, 0.0)}
    made = {}
    for bound, each in limits.items():
        host = VirtualHost(VirtualPart("match", rate=1.0, match=9), pass_ms=straight(13.0, 0.1))
        made[bound] = drafted(host.run(some_sequences(1, each), 50))
    assert made[5.0] == 0 < made[0.0]


def test_what_was_not_measured_is_not_saved_as_nothing() -> None:
    costs = DraftCosts()
    assert costs.beside > 0.0
    saved = DraftCosts()
    saved.restore(costs.state())
    assert saved.beside == costs.beside
    saved.add_beside(0.4)
    assert saved.beside > costs.beside


def test_time_of_plain_requests_buys_no_tries() -> None:
    host = VirtualHost(VirtualPart("head"), pass_ms=DEAR_ROWS)
    host.run(some_sequences(4, drafter="none"), 3000)
    before = host.ms
    assert host.policy.decoded_ms > 0.9 * before, "it counts for saving"
    host.parts[0].level_ms = 20.0  # a try loses more than three steps
    decisions = host.run(some_sequences(1), 60)
    assert not any(made.probe and made.drafters for made in decisions)


@pytest.mark.parametrize(("gain", "drafts"), [(-0.005, False), (0.005, True), (0.05, True)])
def test_a_way_in_use_is_not_held_against_plain_decoding(gain: float, drafts: bool) -> None:
    host = VirtualHost(VirtualPart("match", match=4), pass_ms=straight(10.0, 0.5), noise=0.0)
    (sequence,) = some_sequences(1)
    host.run([sequence], 3)
    signals = host.policy._offers.signals(sequence)
    record = record_of(sequence)
    record.way, record.options = ("match",), None
    known = host.policy.known
    option = host.policy._offers.options(sequence, signals, 1, 10.0, known)
    plain, way = option.offer
    assert plain.bonus == way.bonus == STICKY
    curve = known.curve([sequence])
    ms = curve[1 + int(way.nodes)] + way.own_ms
    offer = [plain, way._replace(nodes=float(int(way.nodes)), accepted=ms / curve[1] * (1 + gain) - 1)]
    choice, _ = host.policy._chosen([option._replace(offer=offer)], known, curve)
    assert bool(choice.picks[0].drafters) == drafts


def test_the_limits_of_all_requests_of_a_batch_hold() -> None:
    """Whichever comes first."""
    part = VirtualPart("head", rate=0.7)
    for slow_first in (False, True):
        host = VirtualHost(part, pass_ms=straight(10.0, 0.4))
        bound, free = some_sequences(1, Limits(max_tpot_ms=0.001))[0], some_sequences(1)[0]
        sequences = [bound, free] if slow_first else [free, bound]
        assert drafted(host.run(sequences, 200)) == 0
        assert not any(made.drafters for made in bound.stats.decisions), "and nothing is tried"
    host = VirtualHost(part, pass_ms=straight(10.0, 0.4))
    assert drafted(host.run(some_sequences(2, Limits(max_tpot_ms=40.0)), 200)) > 200, "a bound that drafts keep"


def test_throughput_is_the_objective_only_if_all_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.policy import auto

    seen, choose = list[bool](), auto.choose

    def noted(*given: object, throughput: bool = False) -> object:
        seen.append(throughput)
        return choose(*given, throughput=throughput)  # type: ignore[arg-type]

    monkeypatch.setattr(auto, "choose", noted)
    most = Limits(objective="throughput")
    for limits, wanted in (((most, most), True), ((most, None), False), ((None, most), False)):
        host = VirtualHost(VirtualPart("head", rate=0.7), pass_ms=straight(10.0, 0.4))
        seen.clear()
        host.run([some_sequences(1, each)[0] for each in limits], 40)
        assert seen and set(seen) == {wanted}, limits


def test_without_the_clock_others_change_no_decision() -> None:
    """Neither those that ran before, nor those beside it."""

    def decided(host: VirtualHost, beside: int) -> list[object]:
        host.chooser.seed(5)
        for part in host.parts:
            part.planned.clear()
        (sequence,) = some_sequences(1, Limits(clock=False))
        host.run([*some_sequences(beside), sequence], 60)
        return [made[:4] for made in sequence.stats.decisions]

    def certain() -> VirtualHost:
        parts = VirtualPart("match", rate=1.0, match=3), VirtualPart("head", rate=0.0)
        return VirtualHost(*parts, pass_ms=straight(10.0, 0.6))

    host = certain()
    alone = decided(host, 0)
    assert any(made[0] for made in alone)  # type: ignore[index]
    assert decided(host, 3) == alone
    host.parts[0].rate = 0.0
    host.run(some_sequences(3), 500)
    host.parts[0].rate = 1.0
    assert decided(host, 0) == alone
    assert decided(certain(), 2) == alone


def test_it_starts_from_saved_costs_without_the_clock() -> None:
    host = VirtualHost(VirtualPart("head", rate=0.8), pass_ms=straight(10.0, 0.2))
    host.run(some_sequences(1), 300)
    saved = host.policy.state()
    for factor, drafts in ((1.0, True), (40.0, False)):
        state = copy.deepcopy(saved)
        state["drafts"]["calls"] = {key: factor * ms for key, ms in state["drafts"]["calls"].items()}
        state["drafts"]["levels"] = {key: factor * ms for key, ms in state["drafts"]["levels"].items()}
        other = VirtualHost(VirtualPart("head", rate=0.8), pass_ms=straight(10.0, 0.2))
        other.policy.restore(state)
        assert (drafted(other.run(some_sequences(1, Limits(clock=False)), 30)) > 20) == drafts


@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_what_was_saved_in_a_bad_hour_is_corrected_within_some_tens_of_steps(factor: float) -> None:
    pass_ms = straight(10.0, 0.25)
    host = VirtualHost(VirtualPart("head", rate=0.75), pass_ms=pass_ms)
    host.run(some_sequences(1), 400)
    state = copy.deepcopy(host.policy.state())
    for medians in state["passes"].values():
        medians.update({rows: ms * factor for rows, ms in medians.items() if int(rows) > 1})
    for name in ("calls", "levels"):
        state["drafts"][name] = {key: ms * factor for key, ms in state["drafts"][name].items()}
    other = VirtualHost(VirtualPart("head", rate=0.75), pass_ms=pass_ms)
    other.policy.restore(state)
    sequences = some_sequences(1)
    first = other.run(sequences, 60)
    assert first[0].probe and not first[0].drafters, "plain decoding is measured anew"
    assert drafted(first[-20:]) >= 15
    other.run(sequences, 60)
    curve = other.policy.known.curve(sequences)
    assert [curve[rows] for rows in (1, 5, 7)] == pytest.approx([10.0, 11.0, 11.5], rel=0.1)
    assert other.policy.known.draft_costs.call("head", 1, 0.0) == pytest.approx(1.4, rel=0.15)


def test_prompts_are_no_load_and_keep_others_from_drafting() -> None:
    """A step that feeds a prompt says nothing about decoding, and its first token does not wait for drafts."""
    host = VirtualHost(VirtualPart("head", rate=0.8), pass_ms=straight(10.0, 0.3))
    sequences = some_sequences(2)
    host.run(sequences, 100)
    before, pace = host.policy.known.curve(sequences)[2], host.policy.known.costs.pace
    host.pass_ms = lambda rows, sequences: 90.0
    for _ in range(60):
        plans = host.step(sequences, prompt_rows=300)
        assert not any(plans[sequence].drafts for sequence in sequences)
    assert (host.policy.known.curve(sequences)[2], host.policy.known.costs.pace) == (before, pace)
    assert sequences[0].stats.decisions[-1].reason.startswith("no draft")
    host.pass_ms = straight(10.0, 0.3)
    assert drafted(host.run(sequences, 10)) >= 18, "and they go on afterwards"


def test_levels_that_do_not_pay_for_their_time_are_not_grown() -> None:
    """`min_level`: tokens that a level must promise, at the present rate and cost of a level."""
    found = []
    for level_ms in (0.1, 1.0):
        part = VirtualPart("head", rate=0.85, level_ms=level_ms)
        host = VirtualHost(part, pass_ms=straight(10.0, 0.2))
        host.run(some_sequences(1), 200)
        found.append(part.planned[-1].min_level)
        rate = (1 + part.rate) / 10.0  # at least
        assert found[-1] >= 0.8 * rate * level_ms
    assert 0.0 < found[0] < 0.2 * found[1] < 0.2


def test_what_drafting_costs_besides_calls_is_part_of_its_price() -> None:
    """Merging, checks and selection: a draft that pays only without them is not used."""
    for beside, drafts in ((0.0, True), (2.5, False)):
        host = VirtualHost(VirtualPart("head", rate=0.3, sure=0.3, depth=2, level_ms=0.3), pass_ms=straight(10.0, 0.1))
        host.beside_ms = beside
        sequences = some_sequences(1)
        host.run(sequences, 400)
        assert (drafted(host.run(sequences, 200)) > 150) == drafts
        assert host.policy.known.draft_costs.beside == pytest.approx(beside, rel=0.15)


def test_short_tries_do_not_make_whole_calls_look_cheap() -> None:
    part = VirtualPart("head", rate=0.8, level_ms=0.5)
    host = VirtualHost(part, pass_ms=straight(10.0, 0.2))
    sequences = some_sequences(1)
    host.run(sequences, 50)
    whole = part.level_ms * (1 + part.depth)
    assert host.policy.known.draft_costs.call("head", 1, 0.0) == pytest.approx(whole, rel=0.1)
    part.rate = 0.0
    host.run(sequences, 3000)
    assert sum(plan.depth == 1 for plan in part.planned) > 20
    assert host.policy.known.draft_costs.call("head", 1, 0.0) == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("count", [1, BATCH])
def test_a_bad_drafter_costs_at_most_one_percent(count: int) -> None:
    """Against plain steps of the same clock, once the guesses of the start are corrected."""
    for sure in (0.1, 0.99):
        host = VirtualHost(VirtualPart("head", rate=0.02, sure=sure, level_ms=0.4), pass_ms=straight(10.0, 0.5))
        sequences = some_sequences(count)
        host.run(sequences, 100)
        tokens, ms = len(sequences[0].tokens), host.ms
        host.run(sequences, 2000)
        plain_ms = 10.0 * (1 + host.noise)
        assert host.ms - ms <= 1.012 * plain_ms * (len(sequences[0].tokens) - tokens), sure


def test_a_text_that_turns_is_followed() -> None:
    """Within 16 steps where the text repeats itself, within 128 where only tries can tell; and back. In a large batch
    tries are rare.
    """
    for count in (1, BATCH):
        match, head = VirtualPart("match", match=0, level_ms=0.01), VirtualPart("head", rate=0.02, level_ms=0.2)
        host = VirtualHost(match, head, pass_ms=straight(10.0, 0.3))
        sequences = some_sequences(count)
        host.run(sequences, 400)
        assert drafted(host.run(sequences, 60)) <= 6 * count, "prose"
        match.match, match.rate = 12, 0.95
        waited = next(step for step in range(200) if drafted(host.run(sequences, 1)))
        assert waited <= 16, "code that repeats itself"
        match.match, match.rate = 0, 0.0
        host.run(sequences, 200)
        head.rate = 0.85
        waited = next(step for step in range(1000) if drafted(host.run(sequences, 1)))
        assert waited <= (128 if count == 1 else 600), "code that only the head foresees"
        head.rate = 0.0
        host.run(sequences, 60)
        assert drafted(host.run(sequences, 60)) <= 6 * count, "prose again"


def test_the_record_is_of_whole_drafts() -> None:
    host = VirtualHost(VirtualPart("head", rate=0.6), pass_ms=straight(10.0, 0.2))
    host.run(some_sequences(1), 300)
    accepted, _ = host.policy.known.record.mean(("head",), Context(0, 0, 0), model=True)
    assert accepted == pytest.approx(sum(0.6**level for level in range(1, 7)), rel=0.25)
