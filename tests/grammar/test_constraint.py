"""A constraint is a function of the output and the path: whatever was asked before, it says the same."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.grammar import Constraint, Grammars
from slipstream.text import Tokenizer
from slipstream.tree import Draw, TokenTree
from tests.grammars import END, SPECS, letters, started
from tests.tongues import byte_level, sentencepiece


@functools.cache
def worded(kind: str) -> Grammars:
    """Vocabularies with longer tokens, where a text can be spelled in several ways."""
    backend, end = (byte_level(500), 0) if kind == "bytes" else (sentencepiece(), 2)
    tokenizer = Tokenizer(backend, eos_ids=[end], bos_id=None if kind == "bytes" else 1)
    return Grammars(tokenizer, len(tokenizer) + 5, frozenset({end}))  # the model has five rows more


VOCABULARIES: dict[str, Any] = {"letters": None, "bytes": worded, "sentencepiece": worded}


def made_by(vocabulary: str) -> Grammars | None:
    return worded(vocabulary) if VOCABULARIES[vocabulary] else None


def allowed(constraint: Constraint, path: list[int]) -> list[int]:
    forbidden = constraint.forbidden(path)
    assert forbidden is not None
    return np.flatnonzero(~forbidden).tolist()


def wandered(constraint: Constraint, chooser: random.Random, length: int, ends: frozenset[int]) -> list[int]:
    """A random path inside the grammar that goes on as long as it can."""
    path: list[int] = []
    for _ in range(length):
        tokens = allowed(constraint, path)
        path.append(chooser.choice([token for token in tokens if token not in ends] or tokens))
    return path


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", SPECS)
def test_a_token_is_allowed_if_and_only_if_it_is_in_the_mask(name: str, vocabulary: str) -> None:
    makes = made_by(vocabulary)
    chooser = random.Random(f"{name} {vocabulary}")
    constraint = started(SPECS[name], made_by=makes)
    ends = frozenset({END}) if makes is None else makes._end_ids
    for _ in range(3):
        path = wandered(constraint, chooser, 12, ends)
        for length in range(len(path) + 1):
            mask = allowed(constraint, path[:length])
            assert mask, "there is always a next token"
            size = len(constraint.forbidden(path[:length]))  # type: ignore[arg-type]
            assert [token for token in range(size) if constraint.allows(path[:length], token)] == mask


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_was_asked_before_changes_no_answer(vocabulary: str, data: st.DataObject) -> None:
    """The matcher is led astray between any two questions: rejected branches leave no trace."""
    makes = made_by(vocabulary)
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    chooser = random.Random(data.draw(st.integers(0, 10**6)))
    ends = frozenset({END}) if makes is None else makes._end_ids
    output: list[int] = []
    asked = started(spec, output, makes)
    path = wandered(started(spec, made_by=makes), chooser, 14, ends)
    for length in range(len(path)):
        for _ in range(3):
            astray = [*path[length : chooser.randrange(length, len(path) + 1)], chooser.randrange(97)]
            question = chooser.choice(["allows", "forbidden", "forced"])
            getattr(asked, question)(*([astray[:-1], astray[-1]] if question == "allows" else [astray]))
        fresh = started(spec, list(path[:length]), makes)
        ahead = path[length : length + chooser.randrange(3)]
        np.testing.assert_array_equal(asked.forbidden(ahead), fresh.forbidden(ahead))
        assert asked.forced(ahead) == fresh.forced(ahead)
        output.append(path[length])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", SPECS)
def test_what_is_forced_is_the_only_token_in_each_mask(name: str, vocabulary: str) -> None:
    makes = made_by(vocabulary)
    chooser = random.Random(f"{name} {vocabulary}")
    constraint = started(SPECS[name], made_by=makes)
    ends = frozenset({END}) if makes is None else makes._end_ids
    path = wandered(constraint, chooser, 20, ends)
    for length in range(len(path)):
        forced = constraint.forced(path[:length])
        for place, token in enumerate(forced):
            assert allowed(constraint, [*path[:length], *forced[:place]]) == [token]


def ids_of(text: str) -> list[int]:
    return Tokenizer(letters()).encode(text, add_special=False)


def test_the_end_is_allowed_where_the_grammar_is_complete_and_only_ends_follow_it() -> None:
    """A mask computed after the grammar has ended; EOS drafted where the grammar forbids it."""
    constraint = started({"choice": ["yes", "yes, of course"]})
    for text, may_end in (("", False), ("ye", False), ("yes", True), ("yes,", False), ("yes, of course", True)):
        assert constraint.allows(ids_of(text), END) == may_end
        assert (END in allowed(constraint, ids_of(text))) == may_end
    for ended in ([END], [END, END], [END] * 5):
        assert allowed(constraint, [*ids_of("yes"), *ended]) == [END]
        assert constraint.allows([*ids_of("yes"), *ended], END)
        assert not constraint.allows([*ids_of("yes"), *ended], ids_of(",")[0])
        assert constraint.forced([*ids_of("yes"), *ended]) == constraint.few([*ids_of("yes"), *ended], 9) == []
    assert allowed(constraint, ids_of("yes, of course")) == [END]
    assert allowed(constraint, ids_of("yes")) == sorted([END, *ids_of(",")])  # as before


def test_outside_the_grammar_nothing_is_constrained() -> None:
    constraint = started({"choice": ["yes"]})
    assert constraint.forbidden(ids_of("no")) is None
    assert constraint.forbidden([*ids_of("ye"), END]) is None  # it ended too early
    assert constraint.allows(ids_of("no"), 5)
    assert constraint.forced(ids_of("no")) == []
    assert allowed(constraint, []) == ids_of("y")


def test_special_tokens_and_rows_beyond_the_vocabulary_are_never_text() -> None:
    constraint = started({"regex": "(?s:.*)"})
    assert allowed(constraint, []) == [*range(95), END]
    wide = started({"regex": "(?s:.*)"}, made_by=worded("bytes"))
    size = len(wide.forbidden([]))  # type: ignore[arg-type]
    assert max(allowed(wide, [])) == size - 6  # the last of the tokenizer's


def test_a_tree_loses_what_the_grammar_forbids() -> None:
    constraint = started({"choice": ["yes", "yellow"]})
    y, e, s, n, o = ids_of("yesno")
    tree = TokenTree(5)
    good = [tree.add(0, y), tree.add(0, n)]
    below = [tree.add(good[0], e), tree.add(good[1], o)]
    leaves = [tree.add(below[0], s), tree.add(below[0], END), tree.add(below[1], END)]
    tree.add(leaves[0], END)
    tree.add(leaves[0], y)
    pruned = constraint.pruned(tree)
    assert [pruned.path_tokens(node) for node in range(len(pruned))] == [[], [y], [y, e], [y, e, s], [y, e, s, END]]
    assert constraint.pruned(pruned) is pruned


def test_scouts_and_sampled_nodes_stay() -> None:
    import torch

    constraint = started({"choice": ["yes"]})
    tree = TokenTree(5)
    scout = tree.add(0, 3, scout=True)
    tree.add(scout, 4, scout=True)
    assert constraint.pruned(tree) is tree
    q = torch.zeros(97)
    q[3] = 1.0
    tree = TokenTree(5)
    tree.add(0, 3, draw=Draw(q))
    assert constraint.pruned(tree) is tree
