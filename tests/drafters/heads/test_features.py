"""Hidden states that a trained drafter reads: there for every token before the root, or nothing is drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM, Plan, SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.drafters import DraftRequest
from slipstream.drafters.growing.tree_growth import GrowingDrafter
from tests.heads import random_head
from tests.stepping import stepped
from tests.tiny import tiny_llm

PROMPT = [5, 9, 17, 3, 44] * 45  # a full page and most of a second one
HOW = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
METHODS = ["eagle3", "kangaroo", "mtp", "mtp,modules=3", "parallel", "parallel,inject=1", "medusa", "draft_model"]
READERS = [name for name in METHODS if name not in ("medusa", "draft_model")]  # of more than the last hidden state


def drafting(kind: str, above: str = "") -> LLM:
    method, *settings = kind.split(",")
    pairs = (setting.split("=") for setting in settings)
    place = random_head(method, stirred=0.05, **{name: int(number) for name, number in pairs})
    return tiny_llm(context=300, characters=True, speculate=f"{above}{method}:checkpoint={place},depth=3,nodes=6")


def drafter_of(llm: LLM) -> GrowingDrafter[Any]:
    drafter = getattr(llm.drafter, "drafters", [llm.drafter])[-1]
    assert isinstance(drafter, GrowingDrafter)
    return drafter


def unobserved(llm: LLM) -> None:
    """Answer the prompt for a request that does not speculate: no drafter is called."""
    llm.generate([PROMPT], replace(HOW, speculate=False))


def offers(llm: LLM, patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], list[float]]]:
    """All trees that are drafted for an answer to the prompt."""
    drafter, seen = drafter_of(llm), []
    healthy = drafter.propose

    def recording(requests: list[DraftRequest]) -> Any:
        trees = healthy(requests)
        seen.extend((list(tree.tokens), list(tree.parents), list(tree.confidence)) for tree in trees)
        return trees

    patch.setattr(drafter, "propose", recording)
    (output,) = llm.generate([PROMPT], HOW)
    assert llm.engine.draft_faults == 0 and output.stats.drafted > 10
    return seen


@pytest.mark.parametrize("above", ["", "suffix+"])
@pytest.mark.parametrize("kind", METHODS)
def test_a_prefix_of_a_request_without_drafts_is_as_good_as_none(
    kind: str, above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, used = drafting(kind, above), drafting(kind, above)
    unobserved(used)
    assert offers(used, monkeypatch) == offers(fresh, monkeypatch)


@pytest.mark.parametrize("kind", READERS)
def test_what_was_read_again_is_found_by_the_next_request(kind: str) -> None:
    llm = drafting(kind)
    needed = llm.drafter.stores_needed
    unobserved(llm)
    assert needed and llm.cache.open(PROMPT).pages and not llm.cache.open(PROMPT, needed).pages
    llm.generate([PROMPT], HOW)
    table = llm.cache.open(PROMPT, needed)
    assert table.lengths[needed[0]] == PAGE_SIZE


@pytest.mark.parametrize("kind", METHODS)
def test_after_a_pause_nothing_is_drafted_from_hidden_states_that_are_missing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter missed a few tokens of an answer: it says that it does not follow, and offers lone roots."""
    llm = drafting(kind)
    drafter = drafter_of(llm)
    stream = stepped(llm, PROMPT, HOW)
    next(stream)
    (sequence,) = llm.engine.scheduler.running
    assert drafter.follows(sequence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.policy, "plan", lambda work, **_: {item.sequence: Plan() for item in work})
        patch.setattr(drafter, "observe", lambda outcomes: None)
        next(stream)
        next(stream)
    sequence.drafting.pop(drafter.key, None)
    needs_all = kind in READERS
    assert drafter.follows(sequence) == (kind == "draft_model")
    for step in range(3):
        with torch.inference_mode():
            (tree,) = drafter.propose([DraftRequest(sequence, drafter.plan)])
        assert (len(tree) > 1) == (not needs_all and (step > 0 or kind == "draft_model"))
        next(stream)
    assert drafter.follows(sequence) != needs_all
    for store in drafter.stores_needed:
        assert sequence.table.lengths[store] == len(PROMPT)
    assert llm.engine.draft_faults == 0
