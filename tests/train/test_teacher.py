"""The teacher: its dense pass over whole texts agrees with the paged engine, for every kind of layer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.drafters.heads.head import Lesson
from slipstream.errors import OptionError
from slipstream.models.load import load_model
from slipstream.models.model import Model, PassOutput
from slipstream.train import teacher as teacher_module
from slipstream.train.teacher import Teacher
from slipstream.tree import TokenTree
from tests.models.test_families import SHAPE, STORE, build
from tests.tiny import tiny_llm

VOCAB = torch.tensor([0, 3, 5, 8, 40, 41, 77, 100, 101, 150, 209, 210])
LENGTHS, PROMPTS = [150, 97, 31], [20, 1, 30]


def texts(vocab_size: int) -> torch.Tensor:
    """Three texts of those lengths, filled up with zeros."""
    chooser = random.Random(5)
    tokens = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = torch.tensor([chooser.randrange(vocab_size) for _ in range(length)])
    return tokens


def paged(model: Model, tokens: list[int], taps: list[int]) -> PassOutput:
    """The engine's pass over one text, logits of every row."""
    cache = PagedCache(4)
    model.add_store(cache, STORE)
    table = cache.open([])
    cache.reserve(table, len(tokens))
    chain = TokenTree.chain(tokens[0], tokens[1:])
    with torch.inference_mode():
        return model.forward(cache, STORE, [tree_segment(table, 0, tokens[:1], chain)], taps=taps)


def taught(model: Model, tokens: torch.Tensor, vocab: torch.Tensor = VOCAB, taps: tuple[int, ...] = (0, 2)) -> Lesson:
    return Teacher(model).lesson(tokens, torch.tensor(PROMPTS), vocab, taps, torch.tensor(LENGTHS))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma2", "mistral", "gemma3", "mixtral", "olmoe-clip"])
def test_taps_and_probabilities_are_those_of_the_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "_SLICE", 7 * SHAPE["vocab_size"])  # a text is judged in many slices
    build(name, tmp_path)
    model, _ = load_model(tmp_path, dtype="float32", device="cpu")
    tokens = texts(SHAPE["vocab_size"])
    lesson = taught(model, tokens)
    for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        output = paged(model, tokens[row, :length].tolist(), [0, 2])
        for layer in (0, 2):
            torch.testing.assert_close(lesson.taps[layer][row, :length], output.taps[layer], atol=1e-4, rtol=0)
        own = slice(prompt - 1, length - 1)
        expected = torch.softmax(output.logits.float(), -1)
        torch.testing.assert_close(lesson.probabilities[row, own], expected[own][:, VOCAB], atol=1e-5, rtol=0)
        first = expected[own].argmax(-1)
        found = lesson.best[row, own]
        assert torch.equal(found >= 0, torch.isin(first, VOCAB))
        assert torch.equal(VOCAB[found[found >= 0]], first[found >= 0])


def test_only_rows_whose_next_token_is_the_targets_own_are_learnt() -> None:
    llm = tiny_llm()
    lesson = taught(llm.model, texts(97), torch.arange(0, 97, 3), (0, 1))
    for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        rows = lesson.learn[row].nonzero()[:, 0].tolist()
        assert rows == list(range(prompt - 1, length - 1))
        assert torch.all(lesson.probabilities[row, rows].sum(-1) > 0)
    assert not lesson.probabilities[~lesson.learn].any()
    assert torch.all(lesson.best[~lesson.learn] == -1)


def test_a_text_does_not_see_what_fills_it_up_nor_its_neighbours() -> None:
    llm = tiny_llm()
    tokens = texts(97)
    alone = Teacher(llm.model).lesson(tokens[2:, :31], torch.tensor([30]), torch.arange(97), [1])
    tokens[2, 31:] = 5
    together = taught(llm.model, tokens, torch.arange(97), (1,))
    torch.testing.assert_close(together.taps[1][2:, :31], alone.taps[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(together.probabilities[2:, :31], alone.probabilities, atol=1e-5, rtol=0)


def test_other_texts_can_be_read_with_the_same_eyes() -> None:
    llm = tiny_llm()
    tokens = texts(97)
    lesson = taught(llm.model, tokens, torch.arange(97), (1,))
    assert lesson.reread is not None
    again = lesson.reread(tokens)
    torch.testing.assert_close(again[lesson.learn], lesson.probabilities[lesson.learn])
    torch.testing.assert_close(again.sum(-1), torch.ones(tokens.shape), atol=1e-5, rtol=0)
    other = tokens.roll(1, dims=1)
    assert not torch.allclose(lesson.reread(other)[lesson.learn], lesson.probabilities[lesson.learn])


def test_a_lesson_can_be_learnt_from_and_the_target_stays_as_it_is() -> None:
    llm = tiny_llm()
    lesson = taught(llm.model, texts(97), torch.arange(97), (1,))
    weight = torch.nn.Parameter(torch.zeros(64, 97))
    (lesson.taps[1] @ weight)[lesson.learn].square().sum().backward()
    assert weight.grad is not None and not lesson.probabilities.requires_grad


def test_a_model_of_transformers_cannot_teach(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, dtype="float32", device="cpu")
    with pytest.raises(OptionError, match="no hidden states"):
        Teacher(model)
