"""Penalties, bias, masks and log-probabilities of lanes: the same, bit for bit, as asking each sampler for one node."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.gpu.adjustments import Adjustments, fits_lanes
from slipstream.gpu.lane_scores import TOPS, score_rows
from slipstream.gpu.lanes import Lanes
from slipstream.sampling import BadWords, logprobs
from slipstream.sequence import Request, Sequence
from tests.interpreted import DEVICE

VOCABULARY, NODES, DEPTH = 300, 9, 4
WORDS = [(7,), (3, 4), (5, 3, 4), (1, 2, 1, 2, 1, 2, 1, 2), (9, 9)]
KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.3, "frequency_penalty": 0.111},
    {"frequency_penalty": 0.37},
    {"presence_penalty": -1.1},
    {"logit_bias": {1: 3.3, 4: -2.2, 290: float("-inf")}},
    {"allowed_token_ids": list(range(100)), "logit_bias": {1: 3.3, 200: 5.0}},
    {"bad_words": ["these"]},
    {"bad_words": ["these"], "min_tokens": 9, "repetition_penalty": 1.01, "stop_token_ids": [8, 3]},
    {"min_tokens": 5},
]


def sequence(chooser: random.Random, kind: dict[str, Any], said: int) -> Sequence:
    """A sequence over few tokens, so that they repeat and words come close."""
    words = BadWords(WORDS) if "bad_words" in kind else None
    request = Request("", None, [chooser.randrange(12) for _ in range(6)], SamplingParams(**kind), 1, words)
    made = Sequence(request, 0, frozenset({2, 6}), 1000)
    made.output_ids += [chooser.randrange(10) for _ in range(said)]
    made.tokens += made.output_ids
    return made


def grown(lanes: Lanes, chooser: random.Random) -> None:
    """Random trees below the roots, over few tokens."""
    for lane in range(lanes.size):
        depths = [0]
        for node in range(1, 1 + lanes.nodes):
            parent = chooser.choice([n for n in range(node) if depths[n] < lanes.depth])
            depths.append(depths[parent] + 1)
            lanes.parents[lane, node] = parent
            lanes.tokens[lane, node] = chooser.randrange(10)


def filled(seed: int, device: str = "cpu") -> tuple[list[Sequence], Lanes, Adjustments]:
    chooser = random.Random(seed)
    sequences = [sequence(chooser, kind, chooser.choice([0, 3, 20])) for kind in KINDS]
    lanes = Lanes(len(KINDS), NODES, DEPTH, 1000, 64, device)
    chosen = dict(enumerate(sequences))
    lanes.fill(chosen, lambda s: len(s.tokens) - 1)
    grown(lanes, chooser)
    tables = Adjustments(lanes, VOCABULARY)
    tables.fill(chosen)
    return sequences, lanes, tables


def path_of(lanes: Lanes, lane: int, node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, int(lanes.tokens[lane, node]))
        node = int(lanes.parents[lane, node])
    return path


def after(sequences: list[Sequence], lanes: Lanes) -> torch.Tensor:
    """The positions of the tokens that are chosen."""
    rows = [len(s.tokens) + len(path_of(lanes, lane, node)) for lane, s in enumerate(sequences) for node in range(10)]
    return torch.tensor(rows)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_adjusted_as_its_sampler_does(seed: int) -> None:
    sequences, lanes, tables = filled(seed)
    for _ in range(3):  # the tables follow what lanes accept
        logits = torch.randn(lanes.size * (1 + NODES), VOCABULARY).to(torch.bfloat16)
        adjusted = tables.adjusted(logits, after(sequences, lanes)).view(lanes.size, 1 + NODES, VOCABULARY)
        raw = logits.view_as(adjusted)
        changed = 0
        for lane, one in enumerate(sequences):
            for node in range(1 + NODES):
                wanted = one.sampler.adjusted(raw[lane, node], path_of(lanes, lane, node)).float()
                assert torch.equal(adjusted[lane, node], wanted), (KINDS[lane], node)
                changed += not torch.equal(wanted, raw[lane, node].float())
        assert changed > 50
        accepted = torch.tensor([random.Random(seed + lane).randrange(DEPTH + 1) for lane in range(lanes.size)])
        tokens = torch.randint(0, 10, (lanes.size, DEPTH + 1))
        lanes.last_tokens.copy_(tokens)
        lanes.accepted.copy_(accepted)
        tables.advance()
        for one, count, new in zip(sequences, accepted.tolist(), tokens.tolist(), strict=True):
            one.output_ids += new[: count + 1]
            one.tokens += new[: count + 1]


def test_a_lane_that_changes_hands_keeps_nothing() -> None:
    sequences, lanes, tables = filled(1)
    logits = torch.randn(lanes.size * (1 + NODES), VOCABULARY)
    positions = after(sequences, lanes)
    tables.fill(dict.fromkeys(range(lanes.size)))
    assert torch.equal(tables.adjusted(logits, positions), logits)


def test_what_lanes_cannot_hold() -> None:
    chooser = random.Random(0)

    def fits(kind: dict[str, Any], words: list[tuple[int, ...]] = WORDS) -> bool:
        one = sequence(chooser, kind, 3)
        one.sampler.bad_words = BadWords(words) if "bad_words" in kind else None
        return fits_lanes(one.sampler, VOCABULARY)

    assert all(map(fits, KINDS))
    many = [(a, b) for a in range(9) for b in range(9)]
    assert not fits({"bad_words": ["many"]}, many)
    assert not fits({"bad_words": ["long"]}, [tuple(range(9))])
    assert not fits({"allowed_token_ids": [2, 6], "min_tokens": 3}), "no token could come"


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_adjusts_the_same(seed: int) -> None:
    from slipstream.gpu.kernels.adjust_kernels import adjust

    sequences, lanes, tables = filled(seed, DEVICE)
    positions = after(sequences, lanes).to(DEVICE)
    logits = torch.randn(lanes.size * (1 + NODES), VOCABULARY).to(DEVICE, torch.bfloat16)
    wanted = filled(seed)[2].adjusted(logits.cpu(), positions.cpu())
    assert torch.equal(adjust(tables, lanes, logits, positions).cpu(), wanted)


def rows_to_score() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, some with ties and -inf; rows of them; tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, VOCABULARY, generator=generator) * 3
    logits[1] = logits[1].round()
    logits[2, ::2] = -torch.inf
    logits[3] = 0.25
    rows = torch.tensor([0, 1, 1, 2, 3, 7, 5, 5])
    tokens = torch.tensor([4, 299, 0, 1, 17, 255, 256, 9])
    return logits, rows, tokens


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_each_row(kind: torch.dtype) -> None:
    logits, rows, tokens = rows_to_score()
    logits = logits.to(kind)
    values, ids = score_rows(logits, rows, tokens, torch.full_like(rows, TOPS))
    for row, token, value, (rank, *id) in zip(rows.tolist(), tokens.tolist(), values, ids.tolist(), strict=True):
        wanted = logprobs(logits[row], token, TOPS)
        assert (wanted[token].logprob, wanted[token].rank) == (value[0].item(), rank)
        assert [wanted[one].logprob for one in id] == value[1:].tolist()
        assert [wanted[one].rank for one in id] == list(range(1, TOPS + 1))


@pytest.mark.kernels
def test_the_kernel_scores_the_same() -> None:
    from slipstream.gpu.kernels.score_kernels import score_rows as kernel

    logits, rows, tokens = (part.to(DEVICE) for part in rows_to_score())
    logits = torch.nn.functional.pad(logits, (0, 9000), value=-7.0)  # several blocks
    logits[:, 8500] = 2.5
    wanted = torch.tensor([0, 20, 5, 20, 20, -1, 1, 3], device=DEVICE)
    values, ids = kernel(logits, rows, tokens, wanted, TOPS)
    right_values, right_ids = score_rows(logits.cpu(), rows.cpu(), tokens.cpu(), wanted.cpu())
    for row, count in enumerate(wanted.tolist()):
        assert ids[row, : 1 + count].tolist() == right_ids[row, : 1 + count].tolist()
        torch.testing.assert_close(values[row, : 1 + count].cpu(), right_values[row, : 1 + count], atol=1e-6, rtol=0)
