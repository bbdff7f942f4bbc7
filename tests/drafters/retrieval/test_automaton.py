"""The suffix automaton against counting by hand."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.retrieval.automaton import ROOT, SuffixAutomaton

ALPHABET = 3  # small, so that short texts repeat themselves
fixed = settings(derandomize=True, deadline=None)  # the same examples on every run, however busy the machine

# 40 tokens: below the number of suffix links that counting follows, so counts must be exact.
tokens_of_texts = st.integers(0, ALPHABET - 1)
texts = st.one_of(st.lists(tokens_of_texts, max_size=8), st.lists(tokens_of_texts, min_size=20, max_size=40))
collections = st.lists(texts, min_size=1, max_size=4)


def grown(many: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in many:
        automaton.start()
        for token in text:
            automaton.extend(token)
    return automaton


def follow(automaton: SuffixAutomaton, tokens: list[int]) -> int | None:
    state: int | None = ROOT
    for token in tokens:
        state = automaton.next[state].get(token)
        if state is None:
            return None
    return state


def occurrences(many: list[list[int]], tokens: list[int]) -> int:
    size = len(tokens)
    return sum(text[i : i + size] == tokens for text in many for i in range(len(text) - size + 1))


def substrings(many: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(text[i:j]) for text in many for i in range(len(text)) for j in range(i + 1, len(text) + 1)}


def check_counts(many: list[list[int]]) -> None:
    automaton = grown(many)
    for substring in substrings(many):
        state = follow(automaton, list(substring))
        assert state is not None
        assert automaton.count[state] == occurrences(many, list(substring))
        assert automaton.length[automaton.link[state]] < len(substring) <= automaton.length[state]
    assert len(automaton) <= 2 * sum(map(len, many)) + 1


@fixed
@given(texts)
def test_every_substring_is_known_and_counted(text: list[int]) -> None:
    check_counts([text])


@fixed
@given(collections)
def test_every_substring_of_several_texts_is_known_and_counted(many: list[list[int]]) -> None:
    check_counts(many)


@fixed
@given(collections, st.lists(st.integers(0, ALPHABET), min_size=1, max_size=8))
def test_nothing_else_is_known(many: list[list[int]], tokens: list[int]) -> None:
    known = follow(grown(many), tokens) is not None
    assert known == (occurrences(many, tokens) > 0)


def test_texts_are_not_joined() -> None:
    automaton = grown([[0, 1], [2, 0]])
    assert follow(automaton, [1, 2]) is None
    assert follow(automaton, [2, 0]) is not None
    assert follow(automaton, [2, 0, 1]) is None


@fixed
@given(collections.filter(lambda many: any(many)), st.data())
def test_continuations_are_counted(many: list[list[int]], data: st.DataObject) -> None:
    """What `suffix` reads: how often each token followed a string."""
    automaton = grown(many)
    context = list(data.draw(st.sampled_from(sorted(substrings(many)))))
    following = automaton.next[follow(automaton, context)]
    counted = {token: automaton.count[state] for token, state in following.items()}
    expected = {token: occurrences(many, [*context, token]) for token in range(ALPHABET)}
    assert counted == {token: count for token, count in expected.items() if count}


@fixed
@given(texts.filter(bool))
def test_the_link_of_the_last_state_is_the_longest_suffix_seen_before(text: list[int]) -> None:
    automaton = grown([text])
    longest = max(n for n in range(len(text)) if n == 0 or occurrences([text], text[len(text) - n :]) > 1)
    state = automaton.link[automaton.last]
    assert automaton.length[state] == longest
    assert follow(automaton, text[len(text) - longest :] if longest else []) == state


@fixed
@given(collections, st.lists(st.integers(0, ALPHABET), max_size=40))
def test_advance_finds_the_longest_suffix_that_occurs(many: list[list[int]], other: list[int]) -> None:
    automaton = grown(many)
    state, matched = ROOT, 0
    for end in range(1, len(other) + 1):
        state, matched = automaton.advance(state, matched, other[end - 1])
        longest = max(n for n in range(end + 1) if n == 0 or occurrences(many, other[end - n : end]))
        assert matched == longest
        assert follow(automaton, other[end - longest : end]) == state


@fixed
@given(collections, texts, st.integers(1, 3))
def test_advance_stays_right_while_the_automaton_grows(many: list[list[int]], other: list[int], pace: int) -> None:
    """States split as texts are added. What is reported must still occur, and be as long as it could know."""
    automaton = SuffixAutomaton()
    feed = [(text, token) for text in range(len(many)) for token in many[text]]
    grown_so_far: list[list[int]] = [[] for _ in many]
    state, matched, began = ROOT, 0, -1
    for end in range(1, len(other) + 1):
        known_before = [list(text) for text in grown_so_far]
        for text, token in feed[(end - 1) * pace : end * pace]:
            if text != began:
                automaton.start()
                began = text
            automaton.extend(token)
            grown_so_far[text].append(token)
        before, (state, matched) = matched, automaton.advance(state, matched, other[end - 1])
        assert matched <= before + 1
        suffix = other[end - matched : end]
        assert matched == 0 or (follow(automaton, suffix) is not None and occurrences(grown_so_far, suffix))
        # At least what occurred when the last token came and is continued now.
        least = max(n for n in range(before + 2) if n == 0 or occurrences(known_before, other[end - n : end]))
        assert matched >= least
        # The state is the one of that very string, or of a longer one of the same class that it was part of.
        assert state == ROOT or follow(automaton, suffix) == state


def test_a_long_repetitive_text_stays_small_and_exact_where_it_matters() -> None:
    """Counting follows a bounded number of links: long contexts must be exact, and short ones never overcounted."""
    generator = random.Random(5)
    text = [0] * 300 + [generator.randrange(2) for _ in range(300)] + [0] * 100
    automaton = grown([text])
    assert len(automaton) <= 2 * len(text) + 1
    for size in (1, 2, 5, 50, 150):
        assert 0 < automaton.count[follow(automaton, text[:size])] <= occurrences([text], text[:size])
    for size in (240, 260, 290):
        assert automaton.count[follow(automaton, text[:size])] == occurrences([text], text[:size])
