"""Catch-up of a drafter's own model: in chunks, all texts at once, with the same result as in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.attention import Segment
from slipstream.cache import PagedCache
from slipstream.drafters.growing.catch_up import Text, catch_up
from slipstream.drafters.growing.tree_growth import GrowingDrafter
from slipstream.tree import TokenTree
from tests.heads import random_head
from tests.stepping import stepped
from tests.tiny import tiny_draft, tiny_llm

PROMPTS = [[5, 9, 17, 3] * 31, [44], [7, 8, 2] * 50]
HOW = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
HEADS = ["eagle3", "mtp", "parallel", "kangaroo", "draft_model"]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.drafters.growing.catch_up.CHUNK", 20)


def texts(cache: PagedCache) -> list[Text]:
    """A long one of which some is known, a short one, one that begins at a slot of its own and one that is known."""
    tables = [cache.open([]) for _ in range(4)]
    for table, known in zip(tables, (7, 0, 30, 4), strict=True):
        cache.reserve(table, 60)
        table.lengths["own"] = known
    return [
        Text(tables[0], list(range(50)), TokenTree(49)),
        Text(tables[1], [3], TokenTree.chain(3, [4, 5])),
        Text(tables[2], list(range(30, 52)), TokenTree(51), start=30),
        Text(tables[3], [1, 2, 3, 4], TokenTree(4)),
    ]


@pytest.mark.usefixtures("pieces")
def test_every_token_is_fed_once_and_the_root_at_last() -> None:
    cache = PagedCache(8)
    cache.add_store("own", 1, 1, 1, 1, torch.float32)
    given = texts(cache)
    passes: list[list[tuple[int, int]]] = []
    fed: dict[int, list[int]] = {id(text.table): [] for text in given}

    def run(some: list[Text], segments: list[Segment]) -> list[tuple[list[int], int]]:
        assert [text.table for text in some] == [segment.table for segment in segments]
        passes.append([(s.committed, s.rows) for s in segments])
        for segment in segments:
            fed[id(segment.table)] += segment.tokens
        return [(s.tokens[s.logits_from :], s.committed) for s in segments]

    results = catch_up("own", given, run)
    assert passes == [[(7, 20), (0, 3), (30, 20), (3, 1)], [(27, 20), (50, 2)], [(47, 3)]]
    assert [tokens for tokens, _ in results] == [[49], [3, 4, 5], [51], [4]], "results of the last pieces, in order"
    assert list(fed.values()) == [list(range(7, 50)), [3, 4, 5], list(range(30, 52)), [4]]
    assert [t.table.lengths["own"] for t in given] == [50, 1, 52, 4], "rows after a root are nobody's yet"


def test_nothing_to_feed_is_no_pass() -> None:
    assert catch_up("own", list[Text](), lambda some, segments: pytest.fail("a pass over nothing")) == []


def drafting(speculate: Any) -> LLM:
    return tiny_llm(context=300, characters=True, speculate=tiny_draft(speculate))


@pytest.mark.parametrize(
    "speculate",
    [
        *({"method": method, "checkpoint": f"head:{method}", "nodes": 6} for method in HEADS),
        {"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 6, "branch": 2},
        {"method": "foreign_draft", "model": "speaker:self"},
    ],
    ids=[*HEADS, "model", "foreign"],
)
def test_a_prompt_that_is_fed_in_pieces_gives_the_same_drafts(
    speculate: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    drafts = []
    for cut in (False, True):
        if cut:
            request.getfixturevalue("pieces")
        llm = drafting(speculate)
        outputs = llm.generate(PROMPTS, HOW)
        assert llm.engine.draft_faults == 0
        drafts.append([(o.token_ids, o.stats.drafted, o.stats.accepted) for o in outputs])
    assert drafts[0] == drafts[1] and sum(drafted for _, drafted, _ in drafts[0]) > 12


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("method", HEADS)
def test_a_drafter_is_brought_up_to_the_roots_without_a_proposal(method: str) -> None:
    llm = drafting({"method": method, "checkpoint": str(random_head(method)), "depth": 3})
    drafter = llm.drafter
    assert isinstance(drafter, GrowingDrafter)
    stream = stepped(llm, PROMPTS[2], HOW)
    next(stream)
    (sequence,) = llm.engine.scheduler.running
    sequence.table.lengths[drafter.key] = 11  # as after a pause
    sequence.drafting.pop(drafter.key, None)
    llm.cache.reserve(sequence.table, len(sequence.tokens) + 8)
    with torch.inference_mode():
        assert drafter.bring_up([]) and drafter.bring_up([sequence])
    assert sequence.table.lengths[drafter.key] == len(sequence.tokens) and drafter.key not in sequence.drafting
    for store in drafter.stores_needed:
        sequence.table.lengths[store] = 11
    with torch.inference_mode():
        assert drafter.bring_up([sequence]) == (not drafter.stores_needed)
    assert [d.token_ids for d in stream], "and the answer goes on"
