"""How many trees a step builds: two for each sequence and drafter at most.

Each drafter of a merge has a tree of its own: one that runs a model has a row of K/V for each node of it, in the order
of the nodes, and offers the best of them as another tree. Merging adds the others' nodes to the first of these trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import LLM
from slipstream.drafters.composites.cascade import CascadeDrafter
from slipstream.drafters.composites.composite import CompositeDrafter
from slipstream.drafters.registry import AnyDrafter
from slipstream.policy import Progress
from slipstream.tree import TokenTree
from tests.drafters.test_conformance import ALL, drafting, params, prompts

__all__ = ["drafting"]  # a fixture


def parts(drafter: AnyDrafter) -> Iterator[AnyDrafter]:
    """The drafters that draft themselves. Of a cascade that is the first: the others judge, round by round."""
    if isinstance(drafter, CompositeDrafter):
        for part in drafter.drafters:
            yield from parts(part)
    elif isinstance(drafter, CascadeDrafter):
        yield from parts(drafter._first)
    else:
        yield drafter


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafting", ALL, indirect=True)
def test_two_trees_are_built_for_each_sequence_at_most(
    drafting: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, inside, proposals, most, most_merging = 0, 0, 0, 0.0, 0.0
    make = TokenTree.__init__

    def counting(tree: TokenTree, root_token: int) -> None:
        nonlocal built
        built += 1
        make(tree, root_token)

    def watched(propose: Any) -> Any:
        def proposing(requests: Any) -> list[TokenTree]:
            nonlocal inside, proposals, most
            before = built
            trees: list[TokenTree] = propose(requests)
            for request, tree in zip(requests, trees, strict=True):
                tree.limited(request.plan.depth, request.plan.nodes)  # what the policy has to build
            most = max(most, (built - before) / len(requests))
            inside += built - before
            proposals += len(requests)
            return trees

        return proposing

    def merging(propose: Any) -> Any:
        def proposing(requests: Any) -> list[TokenTree]:
            nonlocal inside, most_merging
            before, inside = built, 0
            trees: list[TokenTree] = propose(requests)
            most_merging = max(most_merging, (built - before - inside) / len(requests))
            return trees

        return proposing

    whole = drafting.drafter
    monkeypatch.setattr(TokenTree, "__init__", counting)
    for part in parts(whole):
        monkeypatch.setattr(part, "propose", watched(part.propose))
    if isinstance(whole, CompositeDrafter) and not any(isinstance(part, CascadeDrafter) for part in whole.drafters):
        monkeypatch.setattr(whole, "propose", merging(whole.propose))
    drafting.generate(prompts(3, 11), params(3, temperature=temperature, max_tokens=12))
    assert proposals > 0 or not whole.plan.drafts or whole.parts  # a policy may leave requests without drafts
    assert most <= 2 and most_merging == 0


@pytest.mark.parametrize("drafting", ALL, indirect=True)
def test_a_whole_step_builds_no_more(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare root is made only for a sequence without a draft, and merging builds no tree."""
    drafters = [drafting.drafter, *getattr(drafting.drafter, "drafters", ())]
    if any(isinstance(drafter, CascadeDrafter) for drafter in drafters):
        pytest.skip("its levels build trees round by round")
    built, most = 0, 0.0
    make, step = TokenTree.__init__, drafting.engine.step

    def counting(tree: TokenTree, root_token: int) -> None:
        nonlocal built
        built += 1
        make(tree, root_token)

    def stepping() -> list[Progress]:
        nonlocal built, most
        built = 0
        done = step()
        most = max(most, built / max(1, len(done)))
        return done

    monkeypatch.setattr(TokenTree, "__init__", counting)
    monkeypatch.setattr(drafting.engine, "step", stepping)
    drafting.generate(prompts(3, 11), params(3, temperature=0.0, max_tokens=12))
    assert 1 <= most <= 2 * len(list(parts(drafting.drafter)))
