"""Word wrap while an answer streams: whole words, code unchanged, no character lost."""

from __future__ import annotations

import itertools
import random

import pytest

from slipstream.commands.shared.wrap import WordWrap, cells


def wrapped(text: str, width: int, pieces: int = 1) -> str:
    """The text as it is shown when it comes in pieces of so many characters."""
    wrap = WordWrap(width)
    return "".join(wrap.push(text[i : i + pieces]) for i in range(0, len(text), pieces)) + wrap.flush()


PROSE = "The quick brown fox jumps over the lazy dog, again and again, until it is tired of it. " * 3


@pytest.mark.parametrize("pieces", [1, 3, 7, 500])
@pytest.mark.parametrize("width", [12, 40, 79])
def test_words_stay_whole_and_lines_short(width: int, pieces: int) -> None:
    shown = wrapped(PROSE, width, pieces)
    assert shown.split() == PROSE.split()
    lines = shown.splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    for line, following in itertools.pairwise(lines):
        assert len(line.rstrip()) + 1 + len(following.split()[0]) > width, "no line ends earlier than it must"


def test_what_fits_is_not_touched() -> None:
    text = "one two\n\n  three  four\n* five\n"
    assert wrapped(text, 40) == text
    assert wrapped("exactly ten", 11) == "exactly ten"
    assert wrapped("exactly tens", 11) == "exactly\ntens"


@pytest.mark.parametrize("pieces", [1, 4, 500])
def test_code_and_tables_are_not_touched(pieces: int) -> None:
    code = "```python\nprint('a line of code that is much longer than the terminal is wide')\n```\n"
    indented = "    indented code that is much longer than the terminal is wide\n\tso is this one, with a tab\n"
    table = "| a table with | cells that go on | and on |\n"
    for text in (code, indented, table, "~~~\nlong words in a fence of another kind\n~~~\n"):
        assert wrapped(text, 20, pieces) == text
    after = wrapped(code + "these words are prose again", 20, pieces)
    assert after == code + "these words are\nprose again"
    unclosed = "```\nshort\na line of code that never ends well"
    assert wrapped(unclosed, 20, pieces) == unclosed


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    link = "https://example.org/" + "a/" * 30
    assert wrapped(f"see {link} for more", 20) == f"see\n{link}\nfor more"


def test_long_words_do_not_wait_for_their_end() -> None:
    wrap = WordWrap(10)
    assert wrap.push("x" * 11) == "x" * 11
    assert wrap.push("y") == "y"
    assert wrap.push(" z") + wrap.flush() == " z"


def test_wide_characters_count_twice_and_break_anywhere() -> None:
    assert (cells("東京"), cells("e\u0301"), cells("abc")) == (4, 1, 3)
    text = "東京は日本の首都です。人口は世界一です。"
    shown = wrapped(text, 10)
    assert shown.replace("\n", "") == text
    assert all(cells(line) <= 10 for line in shown.splitlines())


def test_nothing_is_lost_whatever_comes() -> None:
    draw = random.Random(0)
    parts = ["a", "bc ", " ", "  ", "\n", "```", "\t", "東", "|", "word "]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randint(0, 40)))
        width, pieces = draw.randint(1, 20), draw.randint(1, 6)
        assert wrapped(text, width, pieces) == wrapped(text, width, 1), "pieces do not matter"
        assert "".join(wrapped(text, width).split()) == "".join(text.split())
