"""Chains of repeating texts, and how they are merged into grown trees; all in tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.device.repeats import chain_scores, follow, match_probability
from slipstream.gpu.forest import Pool
from tests.interpreted import DEVICE

LONGEST = 16


@pytest.mark.kernels
def test_the_kernels_do_what_the_plain_operations_do() -> None:
    from slipstream.drafters.device import repeat_kernels
    from slipstream.gpu.kernels import forest_kernels

    torch.manual_seed(0)

    shapes = (1, 64, 2, 1, 1), (4, 384, 3, 16, 1), (3, 256, 2, 7, 20), (2, 5120, 5, 16, 2)
    for lanes, room, alphabet, length, least in shapes:
        scores = chain_scores(length, least)
        for fresh in (1, 17):
            history = torch.randint(0, alphabet, (lanes, room), dtype=torch.int32)
            slots = torch.randint(fresh, room - fresh, (lanes,))
            slots[0] = 0 if lanes > 1 else fresh
            accepted = torch.minimum(torch.randint(0, fresh, (lanes,)), slots)
            parts = history, torch.randint(0, alphabet, (lanes, fresh)), accepted, slots, scores
            on_device = [part.to(DEVICE, copy=True) for part in parts]
            found, wanted = repeat_kernels.follow(*on_device), follow(*parts)
            assert on_device[0].cpu().equal(history)
            for mine, theirs in zip(found, wanted, strict=True):
                assert mine.cpu().equal(theirs)

    for lanes, branch, widths, length in ((1, 1, [1, 1, 1], 3), (5, 3, [1, 3, 4, 4], 8), (4, 4, [1, 4, 10, 10], 16)):
        for _ in range(5):
            theirs = Pool(lanes, widths, branch, "cpu", length)
            nodes = theirs.begin()
            for level, width in enumerate(widths):
                steps = -torch.randint(0, 9, (lanes * width, branch)).float()
                indices = torch.stack([torch.randperm(branch + 1)[:branch] for _ in range(lanes * width)])
                nodes = theirs.grow(level, nodes, steps, indices, torch.arange(branch + 1))
            mine = Pool(lanes, widths, branch, DEVICE, length)
            for name in ("scores", "tokens", "parents"):
                getattr(mine, name).copy_(getattr(theirs, name))
            tokens = torch.randint(0, branch + 1, (lanes, length))
            scores = -torch.randint(0, 3, (lanes, length)).float().cumsum(1)
            scores[0] = float("-inf") if lanes > 1 else 0.0
            forest_kernels.join(mine, tokens.to(DEVICE), scores.to(DEVICE))
            theirs.join(tokens, scores)
            for name in ("scores", "tokens", "parents"):
                assert getattr(mine, name).cpu().equal(getattr(theirs, name)), name


# -- chains -----------------------------------------------------------------------------------------------------------


def guessed(texts: list[list[int]], length: int, min_match: int = 1, told: int = 3) -> list[tuple[list[int], int]]:
    """The chains after texts, and the lengths of their matches; the end of each text is given as the newest tokens."""
    room = max(map(len, texts)) + told + length
    history = torch.full((len(texts), room), 7, dtype=torch.int32)  # old texts follow the new ones
    taken = torch.full((len(texts), told), 9)
    accepted = torch.tensor([min(told, len(text)) - 1 for text in texts])
    for lane, text in enumerate(texts):
        known = len(text) - 1 - int(accepted[lane])
        history[lane, :known] = torch.tensor(text[:known])
        taken[lane, : len(text) - known] = torch.tensor(text[known:])
    slots = torch.tensor([len(text) - 1 for text in texts])
    scores = chain_scores(length, min_match)
    chains, joint = follow(history, taken, accepted, slots, scores)
    for lane, text in enumerate(texts):
        assert history[lane, : len(text)].tolist() == text
    lengths = [next((m for m in range(min_match, len(scores)) if scores[m].equal(row)), 0) for row in joint]
    assert all(m > 0 or row.eq(-math.inf).all() for m, row in zip(lengths, joint, strict=True))
    return list(zip(chains.tolist(), lengths, strict=True))


def by_hand(text: list[int], length: int, min_match: int = 1) -> tuple[list[int], int] | None:
    """The latest of the longest matches and what followed it, with the guess as part of the text."""
    root, best = len(text) - 1, (0, -1)
    for place in range(root):
        matched = 0
        while matched < max(LONGEST, min_match) and matched <= place and text[place - matched] == text[root - matched]:
            matched += 1
        best = max(best, (matched, place))
    matched, place = best
    if matched < min_match:
        return None
    going = list(text)
    for _ in range(length):
        going.append(going[place + len(going) - root])
    return going[root + 1 :], matched


texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=60))


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 18), st.sampled_from([1, 2, 5, 18]))
def test_chains_are_those_found_by_hand(lanes: list[list[int]], length: int, min_match: int) -> None:
    for text, (chain, matched) in zip(lanes, guessed(lanes, length, min_match), strict=True):
        wanted = by_hand(text, length, min_match)
        assert matched == (wanted[1] if wanted else 0)
        assert wanted is None or chain == wanted[0]


def test_a_loop_goes_on_and_a_text_without_repetition_gives_nothing() -> None:
    loop = [5, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    beginning = [4, 5, 6, 7, 8, 9, 4]
    (of_loop, m), (of_one, one), (of_beginning, first), (_, none), (_, idle) = guessed(
        [loop, [3] * 40, beginning, list(range(20)), [0]], 8
    )
    assert (of_loop, m) == ([1, 2, 3, 1, 2, 3, 1, 2], 6)
    assert (of_one, one) == ([3] * 8, LONGEST)
    assert (of_beginning, first) == ([5, 6, 7, 8, 9, 4, 5, 6], 1)
    assert none == idle == 0


def test_of_equal_matches_the_latest_counts_and_longer_ones_count_more() -> None:
    assert guessed([[1, 2, 7, 1, 2, 8, 1, 2]], 2) == [([8, 1], 2)]
    assert guessed([[0, 1, 2, 7, 1, 2, 8, 0, 1, 2]], 2) == [([7, 1], 3)]


def test_scores_are_joint_probabilities_that_never_rise() -> None:
    scores = chain_scores(5, 2)
    assert scores.shape == (1 + LONGEST, 5) and scores[:2].eq(-math.inf).all()
    for matched in range(2, 1 + LONGEST):
        joint = math.prod(match_probability(matched + step) for step in range(3))
        assert float(scores[matched, 2].exp()) == pytest.approx(joint)
    assert (scores[2:].diff(dim=1) < 0).all() and (scores[2:].diff(dim=0) > 0).all()


# -- joining ----------------------------------------------------------------------------------------------------------

WIDTHS, BRANCH, LANES = [1, 3, 4], 3, 3


def grow(pool: Pool, chance: random.Random) -> None:
    """Random trees over few tokens, with many equal scores."""
    names, nodes = list(range(BRANCH + 2)), pool.begin()
    for level, width in enumerate(WIDTHS):
        steps = torch.tensor([[-chance.randrange(3) / 2 for _ in range(BRANCH)] for _ in range(LANES * width)])
        indices = torch.tensor([chance.sample(names, BRANCH) for _ in range(LANES * width)])
        nodes = pool.grow(level, nodes, steps, indices, torch.tensor(names)) or nodes


def paths(tokens: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...]]:
    """Of nodes numbered from 1 on, the tokens on the way from the root to each."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(found), "a parent stands behind its child"
        found.append((*found[parent], token))
    return found[1:]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_joined_pool_offers_the_likeliest_of_both_and_no_node_without_its_parent(seed: int, length: int) -> None:
    chance = random.Random(seed)
    pool = Pool(LANES, WIDTHS, BRANCH, "cpu", length)
    size = len(pool) - length
    for _ in range(2):  # the first round does not affect the second
        grow(pool, chance)
        wanted = [
            dict(
                zip(
                    paths(pool.tokens[lane, :size], pool.parents[lane, :size]), pool.scores[lane].tolist(), strict=False
                )
            )
            for lane in range(LANES)
        ]
        tokens = torch.tensor([[chance.randrange(BRANCH + 2) for _ in range(length)] for _ in range(LANES)])
        scores = -torch.tensor([[chance.randrange(2) / 2 for _ in range(length)] for _ in range(LANES)]).cumsum(1)
        scores[0] = -math.inf  # a text without a match
        pool.join(tokens, scores)
    count = chance.randrange(1, size + 1)
    offered = pool.best(count)
    for lane, known in enumerate(wanted):
        for step in range(length if lane else 0):
            path = tuple(tokens[lane, : step + 1].tolist())
            known[path] = max(known.get(path, -math.inf), float(scores[lane, step]))
        found = paths(offered[0][lane], offered[1][lane])
        assert len(set(found)) == count, "two nodes are one"
        assert all(path[:-1] in {(), *found} for path in found)
        assert sorted(known[path] for path in found) == sorted(known.values())[-count:]
