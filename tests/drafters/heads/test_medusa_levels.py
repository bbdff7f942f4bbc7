"""`medusa` with heads that read the previous token: level by level, it drafts as it was trained."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from slipstream import SamplingParams
from slipstream.drafters.growing.static_tree import StaticTree
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.tree import TokenTree
from tests.drafters.heads.test_medusa import PROMPTS, fresh, lesson, saved
from tests.tiny import tiny_llm


@pytest.mark.parametrize(("tree", "verifier"), [("static", "match"), ("dynamic", "match"), ("static", "traversal")])
def test_a_node_has_the_logits_that_training_gives_it_after_its_token(
    tree: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If heads read the previous token: after every node, whatever is accepted, alone and in a batch."""
    llm = tiny_llm(verifier=verifier)
    head = fresh(llm, heads=3, before=True)
    llm.use(f"medusa:checkpoint={saved(llm, head)},nodes=12,branch=4,tree={tree}")
    drafter = llm.drafter
    assert isinstance(drafter, MedusaDrafter) and drafter.by_levels
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []
    healthy = drafter._add_level

    def recording(growth: Growth, logits: torch.Tensor, level: int) -> None:
        for node, row in zip(range(growth.fed - len(logits), growth.fed), logits, strict=True):
            seen.append((list(growth.sequence.tokens), growth.tree.path_tokens(node), row))
        healthy(growth, logits, level)

    monkeypatch.setattr(drafter, "_add_level", recording)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=1.0, seed=4, max_tokens=25, ignore_eos=True))
    assert llm.engine.draft_faults == 0 and sum(output.stats.accepted for output in outputs) > 0
    assert {len(path) for _, path, _ in seen} == {0, 1, 2} and len(seen) > 100
    for text, path, row in seen[:: len(seen) // 60]:
        asked = lesson(llm, head, [text + path], 1)
        with torch.no_grad():
            wanted = head.guess(head.states(asked, len(path))[0, len(text) - 2], len(path))
        assert torch.allclose(row, wanted, atol=1e-4)


def test_the_static_tree_of_heads_that_read_the_token_before_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]]
    place = saved(llm, fresh(llm, heads=2, before=True), accuracies=accuracies)
    llm.use(f"medusa:checkpoint={place},nodes=5,tree=static")
    drafter, offers = llm.drafter, list[TokenTree]()
    assert isinstance(drafter, MedusaDrafter)
    healthy = drafter._offer

    def recording(growth: Growth) -> TokenTree:
        tree = healthy(growth)
        if len(tree) > 1:
            offers.append(tree)
        return tree

    monkeypatch.setattr(drafter, "_offer", recording)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    shape = StaticTree.best(accuracies, 5, 10)
    for tree in offers[:-2]:  # there is less room at the end
        counts = Counter(tree.parents[1:])
        places = {node: tuple(tree.children(tree.parents[n]).index(n) for n in tree.path(node)) for node in counts}
        assert {places[node]: count for node, count in counts.items()} == shape.widths
