"""Predicted outputs: the place is found again after every kind of edit, and what was drafted is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, TokenTree
from slipstream.drafters import DraftRequest
from slipstream.drafters.prediction import PredictionDrafter, PredictionOptions
from slipstream.errors import OptionError
from slipstream.sequence import Request, Sequence
from slipstream.types import Stats
from tests.drafters.test_conformance import prompts
from tests.tiny import tiny_llm

Ids = list[int]
_CHOOSER = random.Random(1)
TEXT = [_CHOOSER.randrange(40) for _ in range(300)]  # few different tokens: each occurs in many places


def sequence(prediction: Ids, output: Ids | None = None) -> Sequence:
    request = Request("request", None, [1, 2], SamplingParams(), 1, prediction=tuple(prediction))
    made = Sequence(request, 0, frozenset(), 10_000)
    made.output_ids.extend(output or [])
    made.tokens.extend(output or [])
    return made


def drafter(**options: Any) -> PredictionDrafter:
    return PredictionDrafter(PredictionOptions(**options), None)  # type: ignore[arg-type]


def draft(made: Sequence, by: PredictionDrafter | None = None) -> TokenTree:
    by = by or drafter()
    (tree,) = by.propose([DraftRequest(made, by.plan)])
    tree.check(made.tokens[-1], 100)
    assert len(tree) - 1 <= by.plan.nodes and tree.depth <= by.plan.depth
    return tree


def chain(tree: TokenTree) -> Ids:
    """The likeliest path."""
    node, path = 0, []
    while children := tree.children(node):
        node = max(children, key=lambda child: tree.confidence[child])
        path.append(tree.tokens[node])
    return path


def steps(prediction: Ids, answer: Ids, **options: Any) -> int:
    """Steps in which a model that says `answer` says it."""
    by, made, count = drafter(**options), sequence(prediction), 0
    while len(made.output_ids) < len(answer):
        left = answer[len(made.output_ids) :]
        accepted = draft(made, by).walk(left[:-1])
        made.output_ids.extend(left[: len(accepted) + 1])
        made.tokens.extend(left[: len(accepted) + 1])
        count += 1
    return count


def test_an_answer_longer_than_its_prediction() -> None:
    assert chain(draft(sequence(TEXT))) == TEXT[:18]
    assert chain(draft(sequence(TEXT, TEXT[:9]))) == TEXT[9:45]
    assert chain(draft(sequence(TEXT, TEXT[:60]))) == TEXT[60:108]
    assert chain(draft(sequence(TEXT, TEXT[:-3]))) == TEXT[-3:]
    assert len(draft(sequence(TEXT, TEXT))) == 1
    assert steps(TEXT, TEXT) == 7
    assert steps(TEXT, TEXT, depth=16) == -(-300 // 17)


@pytest.mark.parametrize(
    ("edited", "lost"),
    [
        (lambda text: [*text[:100], 77, *text[101:]], 2),  # replaced
        (lambda text: [*text[:100], 77, *text[100:]], 2),  # inserted
        (lambda text: [*text[:100], 77, 78, 79, *text[103:]], 5),
        (lambda text: [*text[:100], *text[101:]], 2),  # deleted
        (lambda text: [*text[:100], *text[140:]], 4),
        (lambda text: [*text[:100], 77, 78, 79, 80, 81, *text[100:]], 8),
        (lambda text: [*text[100:200], *text[:100], *text[200:]], 9),  # moved
    ],
)
def test_the_place_is_found_again_after_an_edit(edited: Callable[[Ids], Ids], lost: int) -> None:
    answer = edited(TEXT)
    assert steps(TEXT, answer) <= -(-len(answer) // 49) + 1 + lost
    assert steps(TEXT, answer, depth=16) <= -(-len(answer) // 17) + lost


def test_where_there_is_doubt_several_places_become_a_tree() -> None:
    text = [1, 2, 3, 50, 51, 52, 1, 2, 3, 60, 61, 62]
    tree = draft(sequence(text, [9, 9, 1, 2, 3]))
    assert {tuple(tree.path_tokens(node))[:1] for node in tree.children(0)} == {(50,), (60,)}
    assert chain(tree)[:3] == [50, 51, 52]  # of two equal matches, the nearer
    one = draft(sequence(text, [9, 9, 1, 2, 3]), drafter(branch=1))
    assert one.is_chain


def test_a_match_must_be_long_enough() -> None:
    made = sequence([5, 6, 7, 8], [40, 41, 6])
    assert chain(draft(made)) == [7, 8]
    made = sequence([5, 6, 7, 8], [40, 41, 6])
    assert len(draft(made, drafter(min_match=2))) == 1
    with pytest.raises(OptionError, match="min_match"):
        PredictionOptions(min_match=0)


def test_guesses_are_followed_and_not_remembered() -> None:
    made, by = sequence(TEXT, TEXT[:20]), drafter()
    shadow = made.shadow(None)
    shadow.tokens.extend(TEXT[20:25])
    shadow.output_ids.extend(TEXT[20:25])
    assert chain(draft(shadow, by)) == TEXT[25:73]
    assert chain(draft(made, by)) == TEXT[20:68]


def test_without_a_prediction_there_is_no_draft() -> None:
    assert len(draft(sequence([]))) == 1
    assert drafter().signal(sequence([])) == (0, 1, 0) and not drafter().host_only(sequence([]))


def test_the_signal_is_how_well_the_answer_agrees() -> None:
    for output, matched in (([], 1), (TEXT[:9], 10), (TEXT, 0), ([*TEXT[:9], 77], 1), (TEXT[40:44], 4)):
        assert drafter().signal(sequence(TEXT, output)).matched == matched
    assert drafter().host_only(sequence(TEXT))


def answers(llm: LLM, **settings: Any) -> list[Any]:
    how = [SamplingParams(seed=i, max_tokens=40, temperature=0.6 * (i % 2), **settings) for i in range(4)]
    return llm.generate(prompts(4, 8), how)


@pytest.mark.parametrize("speculate", ["prediction", "suffix+prediction", "prediction:branch=3,nodes=40,depth=5"])
def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(speculate: str) -> None:
    plain = answers(tiny_llm())
    llm = tiny_llm(speculate=speculate)
    for number, wanted in enumerate(plain):
        how = SamplingParams(seed=number, max_tokens=40, temperature=0.6 * (number % 2))
        ids = wanted.token_ids
        edited = [*ids[:10], 96, *ids[12:30], 95, 94, *ids[30:]]
        for prediction, most in ((ids, 9), (edited, 22), (ids[::-1], 40), ([0] * 50, 40)):
            asked = SamplingParams(**{**vars(how), "prediction": prediction})
            (output,) = llm.generate([prompts(4, 8)[number]], asked)
            assert output.token_ids == ids
            assert output.stats.steps <= most
            accepted, rejected = output.stats.outcome_of("prediction")
            assert accepted == output.stats.origins.count("prediction") and rejected >= 0
            assert sum(output.stats.drafted_by.values()) == output.stats.drafted
    assert llm.engine.draft_faults == 0


def test_a_prediction_may_be_a_text() -> None:
    llm = tiny_llm(speculate="prediction", characters=True)
    how = {"seed": 1, "max_tokens": 30, "temperature": 0.0}
    (plain,) = llm.generate(["abc"], SamplingParams(**how))
    (output,) = llm.generate(["abc"], SamplingParams(prediction=plain.text, **how))
    assert output.token_ids == plain.token_ids and output.stats.outcome_of("prediction")[0] > 20
    with pytest.raises(OptionError, match="prediction: there is no token 97"):
        llm.generate(["abc"], SamplingParams(prediction=[97]))
    with pytest.raises(OptionError, match="a prediction in text needs a tokenizer"):
        tiny_llm().generate([[1]], SamplingParams(prediction="abc"))


def test_counts_of_several_requests_add_up() -> None:
    total = Stats()
    total.add(Stats(drafted_by={"prediction": 5, "suffix": 2}, origins=["prediction", None]))
    total.add(Stats(drafted_by={"prediction": 3}, origins=["prediction"]))
    assert total.outcome_of("prediction") == (2, 6) and total.outcome_of("suffix") == (0, 2)
    assert total.outcome_of("grammar") == (0, 0)
