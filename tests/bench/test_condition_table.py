"""Ratios where plain decoding is asked fewer prompts than the others, and files of which all or some were measured."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from slipstream.bench.condition_table import ALL, ConditionTable, Grouping
from slipstream.bench.measure import Answer
from slipstream.bench.plain_times import LEAST, Length, fit
from slipstream.bench.schedule import PLAIN, Condition, Schedule
from slipstream.types import Stats

KINDS, EACH = 11, 16
CATEGORIES = [f"c{prompt % KINDS}" for prompt in range(KINDS * EACH)]
GROUPING = Grouping(CATEGORIES, dict(Counter(CATEGORIES)))
IDS = tuple(range(1000))


class File:
    """A file of prompts: what each of them takes on a machine without noise."""

    def __init__(self, seed: int, between: float = 0.35, within: float = 0.3) -> None:
        self.rng = np.random.default_rng(seed)
        count = len(CATEGORIES)
        self.prompt = self.rng.integers(30, 800, count)
        self.tokens = self.rng.integers(20, 129, count)
        self.plain = 14.0 * self.tokens + 0.6 * self.prompt + 2e-4 * self.tokens * (self.prompt + self.tokens / 2)
        kinds = between * np.linspace(-1, 1, KINDS)[np.arange(count) % KINDS]
        self.drafted = self.plain / np.exp(0.55 + kinds + within * self.rng.standard_normal(count))
        self.truth = float(self.plain.sum() / self.drafted.sum())

    def measured(self, prompts: int, every: int, noise: float, rounds: int = 1) -> ConditionTable:
        """The first prompts (categories take turns), of which plain decoding has 22 and then one in `every`."""
        answers = []
        for round in range(rounds):
            for number in range(prompts):
                answers.append(self._answer("auto", number, round, self.drafted[number], noise))
                if number < 2 * KINDS or number % every == 0:
                    answers.append(self._answer(PLAIN, number, round, self.plain[number], noise))
        return ConditionTable(answers, Condition(), GROUPING)

    def _answer(self, setting: str, number: int, round: int, ms: float, noise: float) -> Answer:
        taken = float(ms * np.exp(noise * self.rng.standard_normal() - noise**2 / 2))
        ids = IDS[: self.tokens[number]]
        stats = Stats(steps=len(ids), emitted=len(ids), decoded=len(ids) - 1, decode_ms=0.9 * taken)
        return Answer(0, setting, number, 0, round, number, int(self.prompt[number]), ids, 0.1 * taken, taken,
                      ((taken, 1),), taken, stats)  # fmt: skip


@pytest.mark.parametrize(
    ("prompts", "every", "noise"),
    [(44, 8, 0.03), (88, 8, 0.03), (88, 3, 0.15), (132, 6, 0.05), (176, 8, 0.05), (176, 1, 0.10)],
)
def test_intervals_contain_the_figure_of_the_whole_file(prompts: int, every: int, noise: float) -> None:
    """In so many of 100 files as 95% leaves open."""
    hits, errors = 0, []
    for seed in range(100):
        file = File(seed)
        table = file.measured(prompts, every, noise)
        found = table.speedup("auto", table.chosen(ALL))
        assert found.low is not None and found.high is not None
        hits += found.low <= file.truth <= found.high
        errors.append(found.value / file.truth - 1)
    assert hits >= 88, hits
    assert abs(np.mean(errors)) < 3 * np.std(errors) / 10 + 2e-3, "without a bias"


def test_fewer_plain_answers_and_more_prompts_are_worth_their_time() -> None:
    """The same seconds: 50 prompts with both, or 84 of which few have plain decoding."""
    spreads = []
    for prompts, every in ((50, 1), (84, 8)):
        tables = [File(seed).measured(prompts, every, 0.03) for seed in range(20)]
        seconds = np.mean([sum(answer.e2e_ms for name in table.settings for answer in table.answers(name, table.keys))
                           for table in tables]) / 1000  # fmt: skip
        assert 95 < seconds < 115
        spreads.append(np.mean([table.speedup("auto", table.chosen(ALL)).spread for table in tables]))
    assert spreads[1] < 0.75 * spreads[0]


def test_with_all_prompts_measured_only_noise_is_left() -> None:
    wide, narrow = (File(1).measured(176, 8, noise).speedup("auto", list(zip(range(176), [0] * 176, strict=True)))
                    for noise in (0.15, 0.01))  # fmt: skip
    assert narrow.spread < 0.01 < wide.spread
    table = File(1).measured(176, 8, 0.01)
    beyond = table.speedup("auto", table.chosen(ALL), beyond=True)
    assert beyond.spread > 5 * narrow.spread, "other prompts of these kinds differ from these"
    assert beyond.value == table.speedup("auto", table.chosen(ALL)).value


def test_two_runs_on_a_busy_machine_overlap_and_a_slower_drafter_does_not() -> None:
    """Times vary by a third from answer to answer; the second run is the same file."""
    overlaps, found = 0, 0
    for seed in range(40):
        file = File(seed)
        first, second = (file.measured(66, 2, 0.3).speedup("auto", [(n, 0) for n in range(66)]) for _ in range(2))
        file.drafted *= 2.0
        slower = file.measured(66, 2, 0.3).speedup("auto", [(n, 0) for n in range(66)])
        assert first.low and first.high and second.low and second.high and slower.high
        overlaps += first.low <= second.high and second.low <= first.high
        found += slower.high < first.low
    assert overlaps >= 39 and found >= 38


def test_plain_decoding_is_asked_as_often_as_its_noise_needs() -> None:
    calm, busy = (File(3).measured(66, 1, noise).plain_every() for noise in (0.01, 0.4))
    assert calm == 8 and busy <= 2
    assert File(3).measured(LEAST - 1, 1, 0.01).plain_every() == 1, "too few to fit anything"


def test_where_plain_decoding_is_asked_seldom_each_round_asks_it_other_prompts() -> None:
    schedule = Schedule(range(16), [Condition()], [PLAIN, "auto"], deadline=float("inf"))
    schedule.plain_every = [4]
    asked: list[list[int]] = [[], []]
    for turn in schedule:
        if turn.round > 1:
            break
        assert "auto" in turn.settings
        if PLAIN in turn.settings:
            asked[turn.round] += turn.prompts
    assert asked[0] == [0, 4, 8, 12] and not set(asked[0]) & set(asked[1]) and len(asked[1]) == 4


def test_times_are_fitted_whatever_their_lengths_have_in_common() -> None:
    rng = np.random.default_rng(0)
    alike = fit([Length(100, 64)] * 20, (900 * np.exp(0.1 * rng.standard_normal(20))).tolist())
    assert alike is not None and alike.ms([Length(100, 64)])[0] == pytest.approx(900, rel=0.06)
    assert alike.variance([Length(100, 64)], np.ones(1)) ** 0.5 == pytest.approx(0.1 / 20**0.5, rel=0.5)
    assert fit([Length(100, 64)] * (LEAST - 1), [1.0] * (LEAST - 1)) is None
