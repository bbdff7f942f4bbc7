"""The tree that is picked from linked levels is the best one."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.drafters.growing import lattice as module
from slipstream.drafters.growing.lattice import Lattice
from slipstream.drafters.growing.marginals import best_first

LEVELS, TOKENS = 4, 7


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [levels, tokens] and links [levels - 1, tokens, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(LEVELS, TOKENS, generator=generator), torch.randn(
        LEVELS - 1, TOKENS, TOKENS, generator=generator
    )


def made(scores: torch.Tensor, links: torch.Tensor, branch: int) -> Lattice:
    def link(before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = [by_level[b][:, t] for by_level, b, t in zip(links, before, tokens, strict=True)]
        return torch.stack(rows) if rows else torch.zeros(0, before.shape[1], tokens.shape[1])

    return Lattice(scores, link, branch)


def joint(scores: torch.Tensor, links: torch.Tensor, path: tuple[int, ...], branch: int) -> float:
    """The probability of a path; 0 where a token is none of the `branch` likeliest."""
    result = 1.0
    for level, token in enumerate(path):
        row = scores[level] + (links[level - 1, path[level - 1]] if level else 0.0)
        weights = torch.softmax(row, -1)
        if token not in weights.topk(branch).indices:
            return 0.0
        result *= float(weights[token])
    return result


def paths(found: list[tuple[int, int, float]]) -> dict[tuple[int, ...], float]:
    known: list[tuple[int, ...]] = [()]
    for parent, token, _ in found:
        known.append((*known[parent], token))
    return dict(zip(known[1:], [joint for *_, joint in found], strict=True))


@pytest.mark.parametrize("branch", [1, 3, TOKENS])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_nodes_are_those_of_all_paths(seed: int, branch: int) -> None:
    scores, links = drawn(seed)
    found = paths(made(scores, links, branch).best(25, 0.0))
    every = [p for depth in range(1, LEVELS + 1) for p in itertools.product(range(TOKENS), repeat=depth)]
    values = {path: joint(scores, links, path, branch) for path in every}
    wanted = sorted((v for v in values.values() if v > 0), reverse=True)[:25]
    assert list(found.values()) == pytest.approx(wanted, rel=1e-4)
    assert [values[path] for path in found] == pytest.approx(wanted, rel=1e-4)


def test_without_links_it_is_the_tree_of_marginals() -> None:
    scores, links = drawn(5)
    top = torch.softmax(scores, -1).topk(3)
    wanted = best_first(top.indices.tolist(), top.values.tolist(), 20)
    found = made(scores, torch.zeros_like(links), 3).best(20, 0.0)
    assert [node[:2] for node in found] == [node[:2] for node in wanted]
    assert [node[2] for node in found] == pytest.approx([node[2] for node in wanted], rel=1e-4)


def test_tokens_that_are_no_candidates_keep_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANDIDATES", 3)
    scores, links = drawn(7)
    candidates = [set(row.topk(3).indices.tolist()) for row in scores]
    for level, by_before in enumerate(links):  # no link may reach them, so that the whole can be computed
        by_before[:, [t for t in range(TOKENS) if t not in candidates[level + 1]]] = 0.0
    found = paths(made(scores, links, 3).best(40, 0.0))
    assert len(found) == 40 and {len(path) for path in found} == {1, 2, 3, 4}
    for path, value in found.items():
        assert value == pytest.approx(joint(scores, links, path, TOKENS), rel=1e-4)


def test_paths_without_hope_are_left_out() -> None:
    scores, links = drawn(1)
    lattice = made(scores, links, 3)
    every, likely = paths(lattice.best(30, 0.0)), paths(lattice.best(30, 0.1))
    assert likely == {path: value for path, value in every.items() if value >= 0.1} != every
    scores[:, 1:] = float("-inf")  # all but one token are forbidden
    assert list(paths(made(scores, links, 3).best(30, 0.0))) == [(0,) * depth for depth in range(1, LEVELS + 1)]
    scores[1:] = float("-inf")
    assert list(paths(made(scores, links, 3).best(30, 0.0))) == [(0,)], "no number, and so no node"


def test_one_level_needs_no_links() -> None:
    scores, links = drawn(2)
    found = made(scores[:1], links[:0], 4).best(9, 0.0)
    assert [node[0] for node in found] == [0] * 4


def test_linked_candidates_are_those_of_the_best_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the product of both probabilities, after the two likeliest tokens before."""
    monkeypatch.setattr(module, "CANDIDATES", 3)
    scores, links = drawn(5)

    def across(before: torch.Tensor) -> torch.Tensor:
        return torch.stack([by_level[b] for by_level, b in zip(links, before, strict=True)])

    found = module.linked_candidates(scores, across, 2)
    assert set(found[0].tolist()) == set(scores[0].topk(3).indices.tolist())
    for level in range(1, LEVELS):
        above = torch.softmax(scores[level - 1], -1)
        pairs = dict.fromkeys(range(TOKENS), 0.0)
        for before in above.topk(2).indices.tolist():
            after = torch.softmax(scores[level] + links[level - 1, before], -1)
            pairs = {token: max(pairs[token], float(above[before] * after[token])) for token in pairs}
        assert set(found[level].tolist()) == set(sorted(pairs, key=lambda token: -pairs[token])[:3])
    assert (found != scores.topk(3).indices).any(), "the links change something here"


def test_a_path_that_only_links_find_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANDIDATES", 2)
    scores, links = torch.zeros(2, TOKENS), torch.zeros(1, TOKENS, TOKENS)
    scores[0, 4], scores[1, :2], links[0, 4, 6] = 5.0, 1.0, 9.0

    def link(before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return links[0][before[0]][:, tokens[0]][None]

    candidates = module.linked_candidates(scores, lambda before: links[0][before[0]][None], 2)
    assert (4, 6) in paths(Lattice(scores, link, 2, candidates).best(2, 0.0))
    assert (4, 6) not in paths(Lattice(scores, link, 2).best(4, 0.0))
