"""The target's outputs on a text, cached: the same lesson again, without another pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.drafters.heads.head import Lesson, Rows
from slipstream.train import run as run_module
from slipstream.train.data import ChatData
from slipstream.train.lessons import Page, Texts
from slipstream.train.remembered import Remembered, fitting, remembered
from slipstream.train.run import train
from slipstream.train.teacher import Teacher, own_words
from slipstream.train.trainer import ProgressSink
from tests.chats import VOCAB_SIZE, order, tiny_llm, written
from tests.lessons import new_head

VOCAB = torch.arange(0, VOCAB_SIZE, 2)  # every other token: some first choices are none of them


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(ChatData(written()), 60)


class Asked:
    """Lessons by the target, counted."""

    def __init__(self, texts: Texts, memory: Remembered) -> None:
        self._texts, self._memory = texts, memory
        self.count = 0

    def by_the_target(self, page: Page, rows: Rows) -> Lesson:
        self.count += 1
        return Teacher(tiny_llm().model).lesson(page.tokens, page.prompt_lens, VOCAB, (), page.lengths, rows)

    def lesson(self, *indices: int) -> tuple[Lesson, Lesson]:
        """What memory makes of a page, and what the target says."""
        page = self._texts.page(np.array(indices))
        learn = own_words(page.tokens, page.prompt_lens, page.lengths)
        rows = Rows.of(learn.flatten().nonzero()[:, 0])
        count = self.count
        said = self.by_the_target(page, rows)
        self.count = count
        return self._memory.lesson(page, rows, lambda: self.by_the_target(page, rows)), said


def asked(texts: Texts, kept: int) -> Asked:
    return Asked(texts, Remembered(texts.answer_lengths, kept, VOCAB, torch.float32))


def test_a_lesson_is_recalled_in_whatever_batch_its_texts_come_again(texts: Texts) -> None:
    ask = asked(texts, len(VOCAB))
    for page in ((3, 50, 7), (20, 4)):
        ask.lesson(*page)
    assert ask.count == 2
    again, said = ask.lesson(4, 7, 20, 3)
    assert ask.count == 2, "all of them are known"
    assert torch.equal(again.tokens, said.tokens) and torch.equal(again.learn, said.learn)
    assert torch.equal(again.best, said.best) and (said.best[said.learn] < 0).any()
    torch.testing.assert_close(again.probabilities, said.probabilities)
    assert torch.equal(again.rows, said.rows) and torch.equal(again.counting(), said.counting())
    assert again.reread is not None and said.reread is not None
    torch.testing.assert_close(again.reread(again.tokens), said.reread(said.tokens))


def test_a_text_that_is_new_is_read_and_kept(texts: Texts) -> None:
    ask = asked(texts, len(VOCAB))
    ask.lesson(3, 50)
    ask.lesson(3, 51)
    assert ask.count == 2
    again, said = ask.lesson(51, 50)
    assert ask.count == 2
    torch.testing.assert_close(again.probabilities, said.probabilities)


def test_the_likeliest_are_kept_and_the_others_are_nothing(texts: Texts) -> None:
    ask = asked(texts, 5)
    ask.lesson(3, 50)
    again, said = ask.lesson(50, 3)
    assert ask.count == 1
    largest = said.probabilities >= said.probabilities.topk(5).values[..., -1:]
    torch.testing.assert_close(again.probabilities, said.probabilities * (largest & said.learn[..., None]))
    assert ((again.probabilities > 0).sum(-1)[said.learn] == 5).all()


def test_a_training_learns_the_same_and_asks_about_each_text_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = {"steps": 24, "evaluate": 24, "tokens": 1024}  # more than three epochs
    settings = {"layers": 1}
    read, lesson = 0, Teacher.lesson

    def counted(self: Teacher, tokens: torch.Tensor, *rest: Any) -> Lesson:
        nonlocal read
        read += len(tokens)
        return lesson(self, tokens, *rest)

    monkeypatch.setattr(Teacher, "lesson", counted)
    _, without = train(order("draft_model", tmp_path / "without", course, settings=settings), ProgressSink())
    read_without, read = read, 0
    monkeypatch.setattr(
        run_module,
        "remembered",
        lambda head, texts: Remembered(texts.answer_lengths, len(head.frame.vocab), head.frame.vocab, torch.float32),
    )
    _, kept = train(order("draft_model", tmp_path / "kept", course, settings=settings), ProgressSink())
    epochs = kept.provenance["training"]["epochs"]
    assert epochs >= 3 and read == len(Texts(ChatData(written()), 1024).training) < read_without / epochs + 1
    for name, weight in without.weights.items():
        torch.testing.assert_close(kept.weights[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "tokens", "room", "kept"),
    [
        (1000, 8192, 1 << 30, 64),  # no more than pay
        (1000, 50, 1 << 30, 50),  # no more than there are
        (1000, 8192, 1000 * (4 + 4 * 40), 40),  # as many as fit
        (1000, 8192, 1000 * (4 + 4 * 16), 16),
        (1000, 8192, 1000 * (4 + 4 * 16) - 1, 0),  # too few
        (1000, 40_000, 1000 * (4 + 6 * 20), 20),  # larger numbers
        (1 << 40, 8192, 8 << 30, 0),
    ],
)
def test_as_many_are_kept_as_fit(rows: int, tokens: int, room: int, kept: int) -> None:
    assert fitting(rows, tokens, torch.bfloat16.itemsize, room) == kept


@pytest.mark.parametrize(
    ("method", "settings", "kept"),
    [
        ("draft_model", {}, True),
        ("draft_model", {"loss": "variation"}, True),
        ("draft_model", {"loss": "reverse"}, False),  # it asks how unlikely the other tokens are
        ("eagle3", {}, False),  # it reads hidden states
    ],
)
def test_there_is_a_memory_on_a_gpu_where_a_few_tokens_of_a_row_will_do(
    method: str, settings: dict[str, Any], kept: bool, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = new_head(tiny_llm(), method, VOCAB, **settings)
    assert remembered(head, texts) is None, "on a CPU a training that was interrupted must end the same"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    frame = SimpleNamespace(vocab=_Elsewhere(VOCAB), rows=head.frame.rows)
    found = remembered(SimpleNamespace(top_is_enough=head.top_is_enough, frame=frame), texts)  # type: ignore[arg-type]
    assert (found is not None) == kept


class _Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
