"""Loops are found exactly; near-duplicates are detected in bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.train.synth.loops import BANDS, COPIES, LEAST_LOOP, Duplicates, loop_start, signature


def text(length: int, seed: int = 0, vocabulary: int = 5000) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(vocabulary) for _ in range(length)]


@pytest.mark.parametrize("unfinished", [0, 1])
@pytest.mark.parametrize("period", [1, 2, 3, 7, 12, 40])
def test_a_loop_is_found_where_its_second_copy_begins(period: int, unfinished: int) -> None:
    before, passage = text(50, 1), text(period, 2)
    copies = max(COPIES, -(-LEAST_LOOP // period) + 1)
    tokens = before + passage * copies + passage[: unfinished % period]
    assert loop_start(tokens) == len(before) + period
    assert loop_start(before + passage * (copies - 1)) is None, "one copy less is none"


def test_the_whole_text_may_be_a_loop() -> None:
    assert loop_start([7] * 40) == 1
    assert loop_start([1, 2] * 30) == 2


@pytest.mark.parametrize("tokens", [[], [1], [5] * (LEAST_LOOP - 1), text(400), text(400, 3, vocabulary=30)])
def test_other_texts_have_none(tokens: list[int]) -> None:
    assert loop_start(tokens) is None


def test_a_loop_that_was_left_again_is_none() -> None:
    assert loop_start(text(20) + [9] * 60 + text(5, 8)) is None


def test_a_list_whose_numbers_alone_differ_is_a_loop() -> None:
    before, line = text(30, 1), text(13, 2)
    numbered = [token for entry in range(6) for token in (6000 + entry, *line)]
    assert loop_start(before + numbered) == len(before) + 1 + 13 + 1, "the numbers differ: the copy begins behind one"
    restless = [token for entry in range(6) for token in (6000 + entry, *line[:6], 7000 + entry, *line[6:])]
    assert loop_start(before + restless) is None, "two in fifteen tokens differ"


def test_equal_texts_have_equal_signatures_and_other_texts_other_ones() -> None:
    assert (signature(text(30)) == signature(np.array(text(30)))).all()
    made = [signature(text(30, seed)) for seed in range(500)]
    made += [signature([]), signature([1]), signature([2]), signature([1, 2])]
    assert all(len(bands) == BANDS and bands.all() for bands in made)
    assert len({int(band) for bands in made for band in bands}) == len(made) * BANDS


@pytest.mark.parametrize(("changed", "least", "most"), [(0, 1.0, 1.0), (1, 0.75, 1.0), (8, 0.0, 0.35), (40, 0.0, 0.0)])
def test_the_more_two_texts_share_the_more_often_they_are_taken_for_the_same(
    changed: int, least: float, most: float
) -> None:
    found = 0
    for seed in range(300):
        known, original = Duplicates(), text(60, seed)
        known.add(signature(original))
        copy = list(original)
        for place in random.Random(seed).sample(range(60), changed):
            copy[place] = 9999
        found += known.knows(signature(copy))
    assert least <= found / 300 <= most


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    known = Duplicates(slots=64)
    first = signature(text(30, 0))
    known.add(first)
    assert known.knows(first)
    for seed in range(1, 400):
        known.add(signature(text(30, seed)))
    assert not known.knows(first)
    assert known.knows(signature(text(30, 399)))
