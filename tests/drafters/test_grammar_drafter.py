"""`grammar` drafts what must be said, and all answers where there are few."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams, TokenTree
from slipstream.drafters import DraftRequest
from slipstream.text import Tokenizer
from slipstream.types import Plan
from tests.grammars import END, PERSON, SPECS, lettered_llm, letters

TOKENIZER = Tokenizer(letters())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return lettered_llm("grammar")


def draft(llm: LLM, spec: dict[str, Any], text: str = "", **plan: Any) -> TokenTree:
    (sequence,) = llm.sequences([1], SamplingParams(structured_outputs=spec))
    ids = TOKENIZER.encode(text, add_special=False)
    sequence.output_ids.extend(ids)
    sequence.tokens.extend(ids)
    wanted = Plan(**{"depth": 16, "nodes": 16, "branch": 4, **plan})
    (tree,) = llm.drafter.propose([DraftRequest(sequence, wanted)])
    tree.check(sequence.tokens[-1], 97)
    assert tree.depth <= wanted.depth and tree.drafted <= wanted.nodes
    assert sequence.constraint is not None and sequence.constraint.pruned(tree) is tree
    return tree


def texts(tree: TokenTree) -> set[str]:
    leaves = set(range(len(tree))) - set(tree.parents)
    return {TOKENIZER.decode(tree.path_tokens(node), skip_special=False) for node in leaves}


def test_forced_text_is_certain(llm: LLM) -> None:
    tree = draft(llm, {"json": PERSON})
    assert texts(tree) == {'{"name": "'}
    assert set(tree.confidence) == {1.0} and set(tree.origins[1:]) == {"grammar"}
    assert texts(draft(llm, {"json": PERSON}, '{"name": "x", "age": 3, ', nodes=4)) == {'"kin'}
    assert texts(draft(llm, {"json": PERSON}, '{"name": "x", "age": 3, ', depth=3)) == {'"ki'}


def test_a_few_answers_become_branches(llm: LLM) -> None:
    tree = draft(llm, {"json": PERSON}, '{"name": "x", "age": 3, "kind": "', nodes=40)
    assert {text[:4] for text in texts(tree)} == {'cat"', 'cow"', 'dog"'}
    below = {tree.tokens[node]: tree.confidence[node] for node in tree.children(0)}
    assert below == {ord("c") - 32: 0.5, ord("d") - 32: 0.5}
    assert texts(draft(llm, {"choice": ["yes", "no"]})) == {"yes<b>", "no<b>"}
    assert texts(draft(llm, {"choice": ["a", "b", "c", "d", "e"]})) == {""}  # more than `branch`
    assert len(draft(llm, {"choice": ["yes", "no"]}, min_confidence=0.6)) == 1


def test_where_the_model_is_free_the_draft_ends(llm: LLM) -> None:
    assert len(draft(llm, {"json": PERSON}, '{"name": "x')) == 1
    assert len(draft(llm, SPECS["endless"])) == 1


def test_the_end_is_drafted_once_and_only_where_it_is_allowed(llm: LLM) -> None:
    tree = draft(llm, {"choice": ["yes"]}, "ye")
    assert tree.path_tokens(len(tree) - 1) == [ord("s") - 32, END]
    assert tree.confidence[-1] == 1.0
    assert texts(draft(llm, {"choice": ["yes", "yes!"]}, "ye")) == {"s<b>", "s!<b>"}


def test_a_request_without_a_grammar_gets_no_draft(llm: LLM) -> None:
    (sequence,) = llm.sequences([1], SamplingParams())
    (tree,) = llm.drafter.propose([DraftRequest(sequence, Plan(8, 8))])
    assert len(tree) == 1 and llm.drafter.signal(sequence) == (0, 1)
    (output,) = llm.generate([[1]], SamplingParams(max_tokens=9, seed=1))
    assert output.stats.drafted == 0 and output.stats.steps == 9


def test_certain_nodes_are_always_accepted(llm: LLM) -> None:
    for seed in range(6):
        how = SamplingParams(structured_outputs={"json": PERSON}, seed=seed, temperature=1.0, max_tokens=150)
        for delta in llm.stream([seed, 7], how, trace=True):
            tokens = delta.token_ids
            for tree in delta.trees:  # of several steps, if the reader was slow
                certain = [node for node in range(1, len(tree)) if tree.confidence[node] == 1.0]
                emitted = tree.walk(tokens)
                assert certain == emitted[: len(certain)] or delta.finish_reason is not None
                tokens = tokens[len(emitted) + 1 :]
