"""Structured output with everything else that a request may ask for, and with what may go wrong."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from slipstream import SamplingParams, TokenTree
from slipstream.errors import OptionError
from slipstream.grammar import Constraint
from tests.drafters.test_conformance import prompts
from tests.grammars import END, PERSON, SPECS, complete, lettered_llm

PERSONS = {"json": PERSON}


def how(spec: dict[str, Any], **settings: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=spec, **{"seed": 3, "max_tokens": 120, "temperature": 0.8, **settings})


def test_choices_of_one_request_go_their_own_ways() -> None:
    (output,) = lettered_llm("grammar").generate([[1, 2]], how(PERSONS, n=6, max_tokens=200))
    texts = [choice.text for choice in output.outputs]
    assert all(complete(PERSONS, text) for text in texts) and len(set(texts)) == 6


def test_a_shadow_has_a_grammar_of_its_own() -> None:
    llm = lettered_llm("grammar")
    (sequence,) = llm.sequences([1, 2], how({"choice": ["yes", "no"]}))
    y, e, n = (ord(letter) - 32 for letter in "yen")
    shadow = sequence.shadow(None)
    for twin, token in ((shadow, y), (sequence, n)):
        twin.tokens.append(token)
        twin.output_ids.append(token)
    assert shadow.constraint is not None and sequence.constraint is not None
    assert shadow.constraint.allows([], e) and not sequence.constraint.allows([], e)
    assert shadow.shadow(5).sampler.constraint.allows([], e)  # type: ignore[union-attr]


def test_logprobs_are_of_the_raw_distribution() -> None:
    llm = lettered_llm("suffix+grammar")
    (held,) = llm.generate([[7, 8, 9]], how(PERSONS, logprobs=2))
    assert held.logprobs is not None and len(held.logprobs) == len(held.token_ids)
    free = llm.generate([[7, 8, 9, *held.token_ids[:4]]], SamplingParams(max_tokens=1, logprobs=90, seed=1))[0]
    assert free.logprobs is not None
    token = held.token_ids[4]
    assert held.logprobs[4][token].logprob == pytest.approx(free.logprobs[0][token].logprob, abs=1e-5)
    assert max(entry.rank or 0 for entry in held.logprobs[0].values()) > 1  # `{` is not what it would have said


def test_a_stop_string_ends_before_the_grammar_does() -> None:
    plain = lettered_llm().generate([[7]], how(PERSONS, stop='", "age'))[0]
    assert plain.finish_reason == "stop" and plain.outputs[0].stop_reason == '", "age'
    drafted = lettered_llm("grammar").generate([[7]], how(PERSONS, stop='", "age'))[0]
    assert drafted.text == plain.text and plain.text.startswith('{"name": "')


def test_min_tokens_keeps_the_grammar_going_or_says_that_it_cannot() -> None:
    llm = lettered_llm("grammar")
    spec = {"regex": "[a-f]+"}
    (long,) = llm.generate([[1]], how(spec, min_tokens=30, max_tokens=60))
    assert len(long.token_ids) > 30 and set(long.text) <= set("abcdef")
    with pytest.raises(OptionError, match=r"^structured_outputs, .*min_tokens together forbid every token$"):
        llm.generate([[1]], how({"choice": ["yes"]}, min_tokens=30))
    (after,) = llm.generate([[1]], how({"choice": ["yes"]}))
    assert after.text == "yes"


def test_lists_of_tokens_and_the_grammar_both_hold() -> None:
    llm = lettered_llm("suffix")
    digits = [ord(digit) - 32 for digit in "13579"]
    (output,) = llm.generate([[1]], how({"regex": "[0-9]{8}"}, allowed_token_ids=[*digits, END]))
    assert len(output.text) == 8 and set(output.text) <= set("13579")
    with pytest.raises(OptionError, match="together forbid every token"):
        llm.generate([[1]], how({"regex": "[0-9]{8}"}, allowed_token_ids=[1, 2]))


def test_a_cached_prompt_changes_nothing() -> None:
    llm = lettered_llm("grammar")
    prompt = prompts(9, 1)[8]
    first, second = (llm.generate([prompt], how(PERSONS))[0] for _ in range(2))
    assert first.token_ids == second.token_ids


def test_no_endless_white_space() -> None:
    """A model that would write spaces and line breaks for ever cannot: JSON is written in one way."""
    llm = lettered_llm("grammar")
    for spec in (PERSONS, {"json_object": True}):
        (output,) = llm.generate([[1]], how(spec, logit_bias={0: 1e6}, temperature=0.0, max_tokens=60))
        outside = [part for i, part in enumerate(output.text.split('"')) if i % 2 == 0]
        assert not any("  " in part or part.startswith(" ") for part in outside), output.text


def test_a_rejected_branch_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that offers other texts of the grammar, all of them wrong, in every step."""
    llm = lettered_llm("grammar")
    (wanted,) = llm.generate([[4, 5]], how(PERSONS, speculate=False))

    def astray(requests: Any) -> list[TokenTree]:
        trees = []
        for request in requests:
            tree, constraint = TokenTree(request.sequence.tokens[-1]), request.sequence.constraint
            place = len(request.sequence.output_ids)
            node = 0
            for _ in range(4):
                forbidden = constraint.forbidden(tree.path_tokens(node))
                found = np.flatnonzero(~forbidden).tolist()
                found = [token for token in found if token not in wanted.token_ids[place : place + 1]]
                if not found:
                    break
                node = tree.add(node, found[-1], origin="grammar")
            trees.append(tree)
        return trees

    monkeypatch.setattr(llm.drafter, "propose", astray)
    (output,) = llm.generate([[4, 5]], how(PERSONS))
    assert output.token_ids == wanted.token_ids
    assert output.stats.drafted > 20 and output.stats.accepted == 0 and output.stats.draft_faults == 0


def test_an_end_that_the_grammar_forbids_is_never_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = lettered_llm("grammar")

    def ends(requests: Any) -> list[TokenTree]:
        return [TokenTree.chain(request.sequence.tokens[-1], [END], origin="grammar") for request in requests]

    monkeypatch.setattr(llm.drafter, "propose", ends)
    (output,) = llm.generate([[4, 5]], how({"regex": "[ab]{6}"}))
    assert len(output.text) == 6 and output.stats.drafted == output.stats.accepted == 1  # after the sixth letter


EXPLOSIVE: dict[str, dict[str, Any]] = {  # they compile, and exceed a limit when they are followed
    "crowd": {"json": {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(2000)}}},
    "repeats": {"grammar": 'start: "a"{1000000}'},
    "doubling": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"\n'},
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_grammar_that_explodes_ends_its_own_request_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = lettered_llm("suffix+grammar")
    explodes, fine = how(EXPLOSIVE[name]), how(PERSONS)
    wanted = llm.generate([[1]], fine)[0].token_ids
    stream = llm.stream([1], fine)
    given = list(next(stream).token_ids)
    with caplog.at_level(logging.WARNING), pytest.raises(OptionError, match=r"^structured_outputs: .*items") as one:
        llm.generate([[2]], explodes)
    assert "\n" not in str(one.value)
    for delta in stream:
        given += delta.token_ids
    assert given == wanted
    assert llm.cache.available == llm.cache.capacity


def test_a_matcher_that_fails_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = lettered_llm()
    healthy = Constraint.allows

    def failing(self: Constraint, path: Any, token: int) -> bool:
        if len(self._output) > 5 and self._output[0] == ord("b") - 32:
            raise RuntimeError("the matcher broke")
        return healthy(self, path, token)

    monkeypatch.setattr(Constraint, "allows", failing)
    stream = llm.stream([1], how({"regex": "a[a-z]{12}"}))
    first = next(stream)
    with pytest.raises(RuntimeError, match="the matcher broke"):
        llm.generate([[2]], how({"regex": "b[a-z]{12}"}))
    rest = list(stream)
    assert len(first.token_ids) + sum(len(delta.token_ids) for delta in rest) == 14


def test_masked_drafts_leave_the_distribution_right() -> None:
    """`rejection` with a draft model: answers to a choice of four come as often as the model, masked, says."""
    spec = {"choice": ["ab", "ac", "ba", "bc"]}
    single = lettered_llm()
    chances = {}
    for text in spec["choice"]:
        ids = [ord(letter) - 32 for letter in text]
        chances[text] = 1.0
        for place, among in enumerate(("ab", {"a": "bc", "b": "ac"}[text[0]])):
            free = single.generate([[3, 1, *ids[:place]]], SamplingParams(max_tokens=1, logprobs=97, seed=1))[0]
            assert free.logprobs is not None
            each = {letter: np.exp(free.logprobs[0][ord(letter) - 32].logprob / 1.5) for letter in among}
            chances[text] *= each[text[place]] / sum(each.values())
    draft = {"method": "draft_model", "model": "tiny:1", "depth": 2, "nodes": 4, "branch": 2}
    llm = lettered_llm(draft, "rejection", max_num_seqs=64, cache_tokens=100 * 128)
    (output,) = llm.generate([[3, 1]], how(spec, n=2000, temperature=1.5, max_tokens=3))
    counts = Counter(choice.text for choice in output.outputs)
    assert counts.keys() <= chances.keys()
    seen = [counts[text] for text in chances]
    assert stats.chisquare(seen, [2000 * chance for chance in chances.values()]).pvalue > 1e-4
    assert sum(choice.stats.accepted for choice in output.outputs) > 400


def test_the_answer_of_every_kind_is_text_of_its_grammar() -> None:
    llm = lettered_llm("grammar")
    for name, spec in SPECS.items():
        for seed in range(4):
            (output,) = llm.generate([[1, 2, seed]], how(spec, seed=seed, max_tokens=250))
            if output.finish_reason == "stop":
                assert complete(spec, output.text), (name, output.text)
    as_text = llm.generate([[1]], how({"json": json.dumps(PERSON)}, max_tokens=200))[0]
    assert as_text.token_ids == llm.generate([[1]], how(PERSONS, max_tokens=200))[0].token_ids
