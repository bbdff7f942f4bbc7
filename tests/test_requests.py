"""Requests made from patterns and words."""

from __future__ import annotations

import json
import random
import re

import pytest

from slipstream.train.requests import KINDS, PATTERNS, Requests
from slipstream.train.words import WORDS, own_words
from tests.invoking import ROOT
from tests.tongues import tokenizer

OWN = ("harbour", "lemon", "patience", "orbit", "saffron", "gravel", "treaty", "velvet")


def many(count: int, seed: int = 0) -> list[tuple[int, str]]:
    draw, requests = random.Random(seed), Requests(OWN)
    return [requests.make(draw) for _ in range(count)]


def test_every_pattern_becomes_a_text_without_slots() -> None:
    requests, draw = Requests(OWN), random.Random(1)
    for patterns in PATTERNS.values():
        for pattern in patterns:
            for _ in range(12):
                text = requests._filled(pattern, draw)
                assert not re.search(r"[{}]", text), (pattern, text)
                assert "  " not in text.replace("\n    ", "").replace("    ", "").replace("\n  ", ""), text


def test_requests_begin_like_sentences_and_are_of_every_kind() -> None:
    made = many(4000)
    assert {kind for kind, _ in made} == set(range(len(KINDS)))
    for _, text in made:
        assert text == text.strip() and (text[0].isupper() or text[0] in "\"'"), text
        assert "<<" not in text and ">>" not in text
    assert len({text for _, text in made}) > 3500


def test_a_seed_makes_the_same_requests() -> None:
    assert many(50, 7) == many(50, 7) != many(50, 8)


def test_a_name_that_comes_again_is_the_same_and_a_second_one_is_another() -> None:
    requests, draw = Requests(OWN), random.Random(2)
    for _ in range(200):
        first, again, second = requests._filled("{name}|{name}|{name2}", draw).split("|")
        assert first == again != second
        assert {first, second} <= set(WORDS["name"])


def test_numbers_lie_in_their_range_and_alternatives_may_be_nested() -> None:
    requests, draw = Requests(OWN), random.Random(3)
    found = {requests._filled("{a|b {3-5}|}", draw) for _ in range(200)}
    assert found == {"a", "b 3", "b 4", "b 5", ""}


def test_braces_of_a_program_come_out_as_braces() -> None:
    assert any("{\n" in text and text.count("{") == text.count("}") for _, text in many(3000))


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_own_words_are_single_tokens_behind_a_space(kind: str) -> None:
    assert {"jumps", "brown", "quick"} <= set(own_words(tokenizer(kind)))


def test_a_vocabulary_without_words_makes_requests_all_the_same() -> None:
    assert own_words(tokenizer("characters")) == ()
    assert Requests(())._filled("{word}", random.Random(0)) in WORDS["concept"]


@pytest.mark.parametrize("name", WORDS)
def test_lists_have_no_empty_or_double_entries(name: str) -> None:
    entries = WORDS[name]
    assert all(entry and entry == entry.strip() and "{" not in entry for entry in entries)
    assert name in ("language", "format") or len(set(entries)) == len(entries), "some may be likelier"


def test_no_question_of_the_workload_is_learnt() -> None:
    """A drafter is measured on what it has not been made for."""
    lines = (ROOT / "benchmarks" / "workload.jsonl").read_text().splitlines()
    asked = {json.loads(line)["turns"][0] for line in lines}
    assert len(asked) == 48 and not asked & {text for _, text in many(20_000, 5)}
