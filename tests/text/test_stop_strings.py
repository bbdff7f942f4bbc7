"""Stop strings: found however the text is cut, with no more held back than may matter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import OptionError
from slipstream.text import StopStrings


def stop_by_the_book(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_stops_equal_the_book_however_cut(chunks: list[str], stops: list[str]) -> None:
    stopper, shown, found = StopStrings(stops), "", None
    text = ""
    for chunk in chunks:
        safe, found = stopper.push(chunk)
        shown, text = shown + safe, text + chunk
        assert (found is not None) == any(stop in text for stop in stops)  # known with the piece that completes it
        if found is not None:
            break
    assert (shown + stopper.flush(), found) == stop_by_the_book(text, stops)


def test_stops_hold_back_only_what_may_matter() -> None:
    stopper = StopStrings(["<end>", "\n\n"])
    assert stopper.push("abc<") == ("abc", None)
    assert stopper.push("en") == ("", None)
    assert stopper.push("x\n") == ("<enx", None)
    assert stopper.push("\nmore") == ("", "\n\n")
    assert stopper.push("again") == ("", "\n\n") and stopper.flush() == ""
    stopper = StopStrings(["<end>"])
    assert stopper.push("a<e") == ("a", None) and stopper.flush() == "<e"
    assert StopStrings([]).push("abc") == ("abc", None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_bad_stops(stops: list[Any]) -> None:
    with pytest.raises(OptionError, match="stop string"):
        StopStrings(stops)
