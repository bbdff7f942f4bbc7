"""Requests made from patterns and words."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.bench.prompts import workload
from slipstream.train.synth.phrasebook import phrasebook, read
from slipstream.train.synth.requests import KINDS, Requests, own_words
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
def test_own_words_are_single_tokens_after_a_space(kind: str) -> None:
    assert {"jumps", "brown", "quick"} <= set(own_words(tokenizer(kind)))


def test_a_vocabulary_without_words_makes_requests_all_the_same() -> None:
    assert own_words(tokenizer("characters")) == ()
    for few in ((), ("alone",)):
        first, second = Requests(few)._filled("{word} {word2}", random.Random(0)).split()
        assert {first, second} <= set(BOOK.words["word"]) and first != second


@pytest.mark.parametrize("pattern", ["{passage}", "{text_nature_p} {text_nature}"])
def test_no_sentence_comes_twice_in_a_passage(pattern: str) -> None:
    """Nor does one of a text come again beside it."""
    requests, draw = Requests(OWN), random.Random(4)
    whole = [text for name in ("sentence", "text_nature") for text in BOOK.parts[name] if "{" not in text]
    made = [requests._filled(pattern, draw) for _ in range(300)]
    assert max(text.count(sentence) for text in made for sentence in whole) == 1


def test_more_texts_than_there_are_come_again() -> None:
    requests, count = Requests(OWN), len(BOOK.parts["opening"])
    text = requests._filled("{opening}\n" * (count + 1), random.Random(0))
    assert len(text.splitlines()) == count + 1


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["Do it."], "before the first section: 'Do it.'"),
        (["= kind"], "one weight, after its name: '= kind'"),
        (["= kind 2", "= kind 3"], "one weight, after its name: '= kind 3'"),
        (["+ thing", "a {b}", ": thing", "a"], "of the same name: thing"),
    ],
)
def test_a_file_of_phrases_that_means_nothing_is_refused(lines: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        read(lines)


def test_other_files_beside_the_phrases_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "phrases"
    folder.mkdir()
    for name, content in (("b.txt", b"Second."), ("a.txt", b"= kind 1\nFirst."), ("a.txt~", b"\xff"), ("x.swp", b"\0")):
        (folder / name).write_bytes(content)
    monkeypatch.setattr("slipstream.train.synth.phrasebook.files", lambda package: tmp_path)
    assert phrasebook.__wrapped__().patterns == {"kind": ("First.", "Second.")}


def test_another_line_makes_another_phrasebook_and_a_comment_does_not() -> None:
    first, commented, other = (read(["= kind 1", *lines]) for lines in (["a"], ["# b", "a", ""], ["a", "b"]))
    assert first == commented and first.digest != other.digest


def test_every_list_and_text_has_a_slot() -> None:
    book = [*BOOK.patterns.values(), *BOOK.parts.values()]
    slots = {slot for patterns in book for pattern in patterns for slot in re.findall(r"\b[a-z_]+(?=2?\})", pattern)}
    assert BOOK.words.keys() | BOOK.parts.keys() <= slots | {"lead", "ending"}


def test_some_people_write_small_letters_and_all_others_begin_with_a_capital(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern, begins in (("capital of {country}?", "c"), ("{animal} is here.", "A"), ("Do {task}.", "D")):
        book = replace(BOOK, patterns=dict.fromkeys(KINDS, (pattern,)), parts={"lead": ("Hi!",)})
        monkeypatch.setattr("slipstream.train.synth.requests.phrasebook", lambda book=book: book)
        assert {text.removeprefix("Hi! ")[0] for _, text in many(40)} == {begins}


@pytest.mark.parametrize(("pattern", "joint"), [("Do it.", " "), ("Do this:\n```\nx\n```", "\n\n"), ("do it", "\n\n")])
def test_how_to_answer_is_said_after_a_sentence_or_in_a_line_of_its_own(
    pattern: str, joint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = replace(BOOK, patterns=dict.fromkeys(KINDS, (pattern,)))
    monkeypatch.setattr("slipstream.train.synth.requests.phrasebook", lambda: book)
    said = [text.split(pattern, 1)[1] for _, text in many(60) if not text.endswith(pattern)]
    assert said and all(text.startswith(joint) and text.lstrip() in BOOK.words["ending"] for text in said)


@pytest.mark.parametrize("name", BOOK.words)
def test_lists_have_no_empty_or_double_entries(name: str) -> None:
    entries = BOOK.words[name]
    assert entries and not any("{" in entry for entry in entries)
    assert name in ("language", "format") or len(set(entries)) == len(entries), "some may be likelier"


def test_no_question_of_the_workload_is_learnt() -> None:
    """A drafter is measured on what it was not made for: no request has half of a question's runs of three words."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    lines = (ROOT / "benchmarks" / "workload.jsonl").read_text().splitlines()
    asked = [runs(json.loads(line)["turns"][0]) for line in lines]
    asked += [runs(str(prompt.messages[-1]["content"])) for prompt in workload()]
    assert len(asked) >= 48 + 176
    for _, text in many(6000, 5):
        made = runs(text)
        assert not any(len(made & question) > len(question) / 2 for question in asked), text
