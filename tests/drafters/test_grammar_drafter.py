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
    assert len(tree) == 1 and llm.drafter.signal(sequence) == (0, 1, 0)
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


def test_what_is_forced_continues_the_trees_of_others(llm: LLM) -> None:
    """After a guess that closes the string, and not after one that the grammar forbids."""
    (sequence,) = llm.sequences([1], SamplingParams(structured_outputs={"json": PERSON}))
    ids = TOKENIZER.encode('{"name": "T', add_special=False)
    sequence.output_ids.extend(ids)
    sequence.tokens.extend(ids)
    tree, guesses = TokenTree(ids[-1]), [TOKENIZER.encode(text, add_special=False) for text in ('o"', '"', '"x')]
    for guess in guesses:
        node = 0
        for token in guess:
            node = tree.add(node, token, origin="suffix", confidence=0.5 * tree.confidence[node])
    llm.drafter.extend(DraftRequest(sequence, Plan(depth=10, nodes=40)), tree)
    assert texts(tree) == {'o", "age":', '", "age": ', '"x'}
    assert {tree.confidence[node] for node in range(len(tree)) if tree.origins[node] == "grammar"} == {0.25, 0.5}
    small = TokenTree.chain(ids[-1], guesses[0], origin="suffix")
    llm.drafter.extend(DraftRequest(sequence, Plan(depth=10, nodes=4)), small)
    assert small.drafted == 4 and sequence.constraint is not None and sequence.constraint.pruned(small) is small


@pytest.mark.parametrize("speculate", ["prediction+grammar", "auto:clock=no"])
def test_one_step_takes_a_guess_and_what_is_forced_after_it(speculate: str) -> None:
    parts = {"a": {"type": "string", "maxLength": 4}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": parts, "required": ["a", "b"], "additionalProperties": False}
    how: dict[str, Any] = {"structured_outputs": {"json": schema}, "temperature": 0.0, "max_tokens": 60}
    (plain,) = lettered_llm().generate([[1]], SamplingParams(**how))
    close = plain.text.index('"', len('{"a": "')) + 1  # the end of the first string is all that is predicted
    told = SamplingParams(prediction=plain.token_ids[:close], **how)
    continued, tokens = 0, list[int]()
    llm = lettered_llm(speculate)
    for _ in range(2):  # `auto` has to learn that predictions are right
        tokens.clear()
        for delta in llm.stream([1], told, trace=True):
            tokens += delta.token_ids
            for tree in delta.trees:
                pairs = {
                    (tree.origins[parent], tree.origins[node]) for node, parent in enumerate(tree.parents) if parent
                }
                continued += ("prediction", "grammar") in pairs
    assert continued and tokens == plain.token_ids
