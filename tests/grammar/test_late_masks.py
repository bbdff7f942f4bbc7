"""Choosing first and masking only what was refused is masking first: the same token, always."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.sampling import Sampler, TreeDistributions
from slipstream.tree import TokenTree
from tests.grammar.test_constraint import wandered
from tests.grammars import END, SPECS, started

KEPT: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 5.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.8},
    {"temperature": 1.0, "presence_penalty": -1.0, "logit_bias": {3: 4.0, 17: -2.0}},
    {"temperature": 1.0, "logit_bias": {15: float("-inf")}},
]
CUT: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 0.9, "min_p": 0.2, "repetition_penalty": 1.2},
    {"temperature": 0.0, "top_k": 1},
]


def masked_first(sampler: Sampler, row: torch.Tensor, path: list[int]) -> int:
    """By the definition: the forbidden tokens are gone before anything else happens."""
    forbidden = sampler.constraint.forbidden(path)  # type: ignore[union-attr]
    assert forbidden is not None
    left = row.clone()
    left[torch.from_numpy(forbidden)] = float("-inf")
    return sampler.free.choose(left, path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_choice_is_that_of_masking_first(data: st.DataObject) -> None:
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    how = SamplingParams(structured_outputs=spec, **data.draw(st.sampled_from(KEPT + CUT)))
    chooser = random.Random(data.draw(st.integers(0, 10**6)))
    whole = wandered(started(spec), chooser, 12, frozenset({END}))
    cut = chooser.randrange(len(whole))
    output, path = whole[:cut], whole[cut : chooser.randrange(cut, len(whole) + 1)]
    sampler = Sampler(how, chooser.randrange(99), 0, [1, 2, 3], output, [END], None, started(spec, output))
    scale = data.draw(st.sampled_from([0.1, 1.0, 8.0]))
    row = scale * torch.randn(97, generator=torch.Generator().manual_seed(chooser.randrange(10**6)))
    if data.draw(st.booleans()):  # often the best of all tokens is allowed, and often not
        row[chooser.randrange(97)] += 20.0
    chosen = sampler.choose(row, path)
    assert chosen == masked_first(sampler, row, path)
    assert not sampler.constraint.forbidden(path)[chosen]  # type: ignore[union-attr,index]
    assert sampler.probabilities(row, path)[chosen] > 0


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_choices_made_together_are_checked_at_each_node(data: st.DataObject) -> None:
    """As on a GPU, where the choices at all nodes come from the device without a mask."""
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    chooser = random.Random(data.draw(st.integers(0, 10**6)))
    how = SamplingParams(structured_outputs=spec, temperature=chooser.choice([0.0, 1.0]))
    whole = wandered(started(spec), chooser, 6, frozenset({END}))
    tree = TokenTree.chain(1, whole)
    sampler = Sampler(how, 7, 0, [1], [], [END], None, started(spec, []))
    rows = torch.randn(len(tree), 97, generator=torch.Generator().manual_seed(chooser.randrange(10**6)))
    free = [sampler.free.choose(rows[node], tree.path_tokens(node)) for node in range(len(tree))]
    together, alone = TreeDistributions(sampler, tree, rows, free), TreeDistributions(sampler, tree, rows)
    for node in chooser.sample(range(len(tree)), len(tree)):
        assert together.choose(node) == alone.choose(node) == masked_first(sampler, rows[node], tree.path_tokens(node))


def test_a_mask_is_computed_only_where_a_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    constraint = started({"regex": "[a-z]+"}, [])
    healthy = constraint.forbidden
    monkeypatch.setattr(constraint, "forbidden", lambda path: asked.append(list(path)) or healthy(path))
    row = torch.zeros(97)
    row[ord("k") - 32] = 9.0
    for settings_, computed in (({"temperature": 0.0}, 0), ({"temperature": 1.0, "top_p": 0.9}, 1)):
        how = SamplingParams(structured_outputs={"regex": "[a-z]+"}, **settings_)
        sampler = Sampler(how, 7, 0, [1], [], [END], None, constraint)
        assert sampler.choose(row, []) == ord("k") - 32
        assert (len(asked) > 0) == computed
    row[ord("K") - 32] = 10.0  # upper case: refused
    asked.clear()
    how = SamplingParams(structured_outputs={"regex": "[a-z]+"}, temperature=0.0)
    assert Sampler(how, 7, 0, [1], [], [END], None, constraint).choose(row, []) == ord("k") - 32
    assert asked
