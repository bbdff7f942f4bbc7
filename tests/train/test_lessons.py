"""Batches, held-out texts, the draft vocabulary, the learning rate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import OptionError
from slipstream.train.config import TrainConfig, rate
from slipstream.train.data import ChatData, ChatWriter
from slipstream.train.lessons import Texts

BUDGET = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ChatData:
    """Chats of 12 to 111 tokens; chat i has a prompt of 10 tokens, and an answer of threes and one token of its own."""
    return made(tmp_path_factory.mktemp("data"), 700)


def made(place: Path, count: int) -> ChatData:
    with ChatWriter(place, fingerprint="f", vocab_size=300) as writer:
        for number in range(count):
            answer = [3] * (1 + number % 100) + [100 + number % 7]
            writer.append([9] * 10 + answer, 10)
    return ChatData(place)


def test_every_text_is_read_once_in_an_epoch_and_none_that_is_held_out(data: ChatData) -> None:
    texts = Texts(data, 1024)
    for epoch in (0, 3):
        read = np.concatenate(texts.batches(1, epoch, BUDGET))
        assert sorted(read.tolist()) == texts.training.tolist()
    assert not set(texts.training.tolist()) & set(texts.held_out.tolist())
    assert len(texts.training) + len(texts.held_out) == len(data)


def test_the_order_follows_from_seed_and_epoch_alone(data: ChatData) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in Texts(data, 1024).batches(seed, epoch, BUDGET)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3) and order(1, 2) != order(2, 2)


def test_a_batch_keeps_to_its_budget_and_is_hardly_filled_up(data: ChatData) -> None:
    texts = Texts(data, 1024)
    filled = used = 0
    for batch in texts.batches(0, 0, BUDGET):
        page = texts.page(batch)
        assert page.tokens.numel() <= BUDGET or len(batch) == 1
        filled += page.tokens.numel()
        used += int(page.lengths.sum())
    assert used > 0.9 * filled
    alone = texts.batches(0, 0, 1)
    assert all(len(batch) == 1 for batch in alone) and len(alone) == len(texts.training)


def test_texts_are_cut_and_those_without_an_answer_left_out(data: ChatData) -> None:
    texts = Texts(data, 20)
    page = texts.page(texts.training[:50])
    assert page.tokens.shape[1] == int(page.lengths.max()) == 20
    for row, index in enumerate(texts.training[:50]):
        length = int(page.lengths[row])
        assert page.tokens[row, :length].tolist() == data[int(index)].tokens[:20].tolist()
        assert not page.tokens[row, length:].any() and page.prompt_lens[row] == 10
    assert len(Texts(data, 11).training) > 0
    with pytest.raises(OptionError, match="0 texts with an answer in its first 10 tokens"):
        Texts(data, 10)


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (40, 20), (700, 32), (4000, 40)])
def test_how_many_texts_are_held_out(count: int, held_out: int, tmp_path: Path) -> None:
    assert len(Texts(made(tmp_path, count), 1024).held_out) == held_out


def test_the_draft_vocabulary_is_what_the_answers_have_most_of(data: ChatData) -> None:
    texts = Texts(data, 1024)
    counts = np.bincount([int(data[int(i)].tokens[-1]) for i in texts.training], minlength=300)
    frequent = sorted(range(100, 107), key=lambda token: (-counts[token], token))
    assert texts.vocabulary(4, []).tolist() == sorted([3, *frequent[:3]])
    assert texts.vocabulary(4, [250]).tolist() == sorted([3, *frequent[:2], 250]), "what ends an answer is always there"
    # 9 is frequent in prompts alone; of tokens that never come, the lowest ids fill up.
    assert texts.vocabulary(10, []).tolist() == [0, 1, 3, *range(100, 107)]
    for all_of_them in (0, 300, 5000):
        assert torch.equal(texts.vocabulary(all_of_them, []), torch.arange(300))


def test_the_rate_goes_up_in_a_line_and_down_along_a_cosine() -> None:
    config = TrainConfig(steps=1000, rate=2.0)
    rates = [rate(config, step, step / 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(0.02) and rates[99] == pytest.approx(2.0, rel=0.03)
    assert rates[500] == pytest.approx(1.01, abs=0.01) and rates[-1] == pytest.approx(0.02, abs=1e-3)
    assert all(a >= b for a, b in pairwise(rates[100:]))
    timed = TrainConfig(minutes=5, rate=2.0)
    assert [rate(timed, step, 0.0) for step in (0, 49, 300)] == pytest.approx([0.02, 1.0, 2.0])
    assert rate(timed, 300, 1.2) == pytest.approx(0.02)
