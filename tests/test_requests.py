"""Requests made from patterns and words."""

from __future__ import annotations

import json
import random
import re

import pytest

from slipstream.train.phrasebook import phrasebook, read
from slipstream.train.requests import KINDS, Requests, own_words
from tests.invoking import ROOT
from tests.tongues import tokenizer

BOOK = phrasebook()
OWN = tuple(
    begin + end
    for begin in ["har", "lem", "pat", "orb", "saf", "gra", "tre", "vel", "mon", "tim"]
    for end in ["bour", "onade", "ience", "ital", "fron", "vets", "aty", "vest", "ument", "ber"]
)


def many(count: int, seed: int = 0) -> list[tuple[int, str]]:
    draw, requests = random.Random(seed), Requests(OWN)
    return [requests.make(draw) for _ in range(count)]


def test_every_pattern_becomes_a_text_without_slots() -> None:
    requests, draw = Requests(OWN), random.Random(1)
    for patterns in (*BOOK.patterns.values(), *BOOK.parts.values()):
        for pattern in patterns:
            for _ in range(6):
                text = requests._filled(pattern, draw)
                assert not re.search(r"[{}]", text), (pattern, text)


def test_requests_have_no_margins_and_are_of_every_kind() -> None:
    made = many(4000)
    assert {kind for kind, _ in made} == set(range(len(KINDS)))
    for kind, text in made:
        assert text == text.strip(), (kind, text)
        assert "<<" not in text and ">>" not in text
    assert len({text for _, text in made}) > 3500


def test_a_file_of_phrases_has_sections_of_requests_texts_and_words() -> None:
    first = ["# of no account", "= kind of request 3", r"Do\n{this}", "", "+ this", "it: {thing}"]
    book = read([*first, ": thing", "a; b;", "c c", "= kind of request 3", "Again"])
    assert book.patterns == {"kind of request": ("Do\n{this}", "Again")} and book.weights == {"kind of request": 3}
    assert book.parts == {"this": ("it: {thing}",)} and book.words == {"thing": ("a", "b", "c c")}


def test_kinds_are_as_likely_as_their_weights() -> None:
    count = 6000
    made = [kind for kind, _ in many(count)]
    whole = sum(BOOK.weights.values())
    for place, kind in enumerate(KINDS):
        share = BOOK.weights[kind] / whole
        assert abs(made.count(place) / count - share) < 5 * (share / count) ** 0.5


def test_a_seed_makes_the_same_requests() -> None:
    assert many(50, 7) == many(50, 7) != many(50, 8)


def test_a_name_that_comes_again_is_the_same_and_a_second_one_is_another() -> None:
    requests, draw = Requests(OWN), random.Random(2)
    for _ in range(200):
        first, again, second = requests._filled("{name}|{name}|{name2}", draw).split("|")
        assert first == again != second
        assert {first, second} <= set(BOOK.words["name"])


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
    for few in ((), ("alone",)):
        first, second = Requests(few)._filled("{word} {word2}", random.Random(0)).split()
        assert {first, second} <= set(BOOK.words["word"]) and first != second


def test_no_sentence_comes_twice_in_a_passage() -> None:
    requests, draw = Requests(OWN), random.Random(4)
    for _ in range(200):
        text = requests._filled("{passage}", draw)
        assert text.count("The old town hall") <= 1 and text.count("In the evening") <= 1


@pytest.mark.parametrize("name", BOOK.words)
def test_lists_have_no_empty_or_double_entries(name: str) -> None:
    entries = BOOK.words[name]
    assert all(entry and entry == entry.strip() and "{" not in entry for entry in entries)
    assert name in ("language", "format") or len(set(entries)) == len(entries), "some may be likelier"


def test_no_question_of_the_workload_is_learnt() -> None:
    """A drafter is measured on what it was not made for: no request has half of a question's runs of three words."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    lines = (ROOT / "benchmarks" / "workload.jsonl").read_text().splitlines()
    asked = [runs(json.loads(line)["turns"][0]) for line in lines]
    assert len(asked) == 48
    for _, text in many(6000, 5):
        made = runs(text)
        assert not any(len(made & question) > len(question) / 2 for question in asked), text
