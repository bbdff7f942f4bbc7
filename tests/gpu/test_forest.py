"""Trees as arrays: what is done with them on a device is what the host does with its own trees."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import noise
from slipstream.gpu import forest
from slipstream.gpu.forest import Pool, SamplingNoise
from slipstream.tree import TokenTree
from tests.interpreted import DEVICE


@pytest.mark.kernels
def test_the_kernels_do_what_the_plain_operations_do() -> None:
    from slipstream.gpu.kernels import forest_kernels as kernels

    torch.manual_seed(0)

    for lanes, nodes, levels in ((1, 1, 0), (3, 12, 4), (2, 64, 6), (2, 70, 9)):
        parents = torch.stack([torch.tensor([0] + [int(torch.randint(0, n, ())) for n in range(1, nodes)])] * lanes)
        depths, _ = forest.geometry(parents, nodes)
        parents = torch.where(depths > levels, 0, parents)  # no deeper than that
        for mine, theirs in zip(
            kernels.geometry(parents.to(DEVICE), levels), forest.geometry(parents, levels), strict=True
        ):
            assert mine.cpu().equal(theirs)
        tokens, chosen = torch.randint(0, 3, (lanes, nodes)), torch.randint(0, 3, (lanes, nodes))
        wanted = forest.walk(tokens, parents, chosen, levels)
        found = kernels.walk(tokens.to(DEVICE), parents.to(DEVICE), chosen.to(DEVICE), levels)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.cpu().equal(theirs)
        if levels:
            path, (depths, _) = wanted[0], forest.geometry(parents, levels)
            origins, scores = torch.randint(0, 2, (lanes, nodes)), -3 * torch.rand(lanes, nodes) * depths
            active = torch.randint(0, 2, (lanes,))
            counts = torch.randint(0, 9, (2, levels, 8, 2))
            ours = counts.clone().to(DEVICE)
            kernels.count(ours, *(part.to(DEVICE) for part in (parents, origins, depths, scores, path, active)))
            forest.count(counts, parents, origins, depths, scores, path, active)
            assert ours.cpu().equal(counts)

    for rows, size, count in ((1, 4, 4), (3, 40, 10), (2, 300, 63)):
        scores = torch.randint(-30, 0, (rows, size)).float()  # many are equal
        for mine, theirs in zip(kernels.highest(scores.to(DEVICE), count), forest.highest(scores, count), strict=True):
            assert mine.cpu().equal(theirs)

    for lanes, branch, widths in ((1, 1, [1, 1, 1]), (3, 4, [1, 4, 10, 10]), (2, 12, [1, 12, 12])):
        ids = torch.randperm(500).sort().values
        mine, theirs = Pool(lanes, widths, branch, DEVICE), Pool(lanes, widths, branch, "cpu")
        ours, wanted = mine.begin(), theirs.begin()
        for level, width in enumerate(widths):
            scores = -torch.randint(0, 9, (lanes * width, branch)).float()
            indices = torch.randint(0, 500, (lanes * width, branch))
            parts = kernels.grow(mine, level, ours, scores.to(DEVICE), indices.to(DEVICE), ids.to(DEVICE), -60.0)
            ours = parts and forest.Followed(*parts)
            wanted = theirs.grow(level, wanted, scores, indices, ids)
            assert (ours is None) == (wanted is None) == (level + 1 == len(widths))
            for name in ("places", "tokens", "parents", "scores", "bits") if wanted else ():
                assert getattr(ours, name).cpu().equal(getattr(wanted, name)), name
        for name in ("scores", "tokens", "parents"):
            assert getattr(mine, name).cpu().equal(getattr(theirs, name)), name

    for rows, size, count in ((1, 8, 3), (3, 100, 4), (2, 1000, 10)):
        logits = 4 * torch.randn(rows, size)
        keys, ids = torch.randint(0, 2**32, (2, rows)), torch.randperm(50_000)[:size].sort().values
        for sampling in (None, SamplingNoise(torch.tensor([0.7, 0.0, 1.3])[:rows], keys, ids)):
            wanted = forest.likeliest_tokens(logits, count, sampling)
            on_device = sampling and SamplingNoise(*(part.to(DEVICE) for part in (sampling.temperatures, keys, ids)))
            found = kernels.likeliest_tokens(logits.to(DEVICE), count, on_device)
            assert found[1].cpu().equal(wanted[1])
            assert (found[0].cpu() - wanted[0]).abs().max() < 1e-4
        # Rows of an entry, with keys of a level among those of others, as loops hand them over.
        entries = torch.randint(0, 2**32, (2, 3, rows))[:, 1]
        shared = [torch.full((rows,), 0.7), entries, ids]
        wanted = forest.likeliest_tokens(logits.repeat_interleave(2, 0), count, SamplingNoise(*shared))
        on_device = SamplingNoise(*(part.to(DEVICE) for part in shared))
        found = kernels.likeliest_tokens(logits.repeat_interleave(2, 0).to(DEVICE), count, on_device)
        assert found[1].cpu().equal(wanted[1])


@st.composite
def trees(draw: st.DrawFn, nodes: int = 40) -> list[int]:
    """Parents of a tree's nodes, the root's own first."""
    count = draw(st.integers(1, nodes))
    return [0, *(draw(st.integers(0, node - 1)) for node in range(1, count))]


def as_tree(parents: list[int], tokens: list[int]) -> TokenTree:
    tree = TokenTree(tokens[0])
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        tree.add(parent, token)
    return tree


@settings(max_examples=60, deadline=None)
@given(trees())
def test_geometry_is_that_of_the_tree(parents: list[int]) -> None:
    tree = as_tree(parents, list(range(len(parents))))  # no two tokens alike, so that no two nodes are one
    depths, bits = forest.geometry(torch.tensor([parents]), max(tree.depths))
    assert depths[0].tolist() == list(tree.depths)
    columns = torch.arange(len(parents))
    seen = (bits[0][:, columns // 32].long() >> (columns % 32)) & 1
    assert seen.bool().equal(torch.from_numpy(tree.ancestor_mask()))


@settings(max_examples=60, deadline=None)
@given(trees(), st.randoms(use_true_random=False))
def test_the_walk_follows_the_choices_as_far_as_there_are_children(parents: list[int], chance: random.Random) -> None:
    tree = as_tree(parents, chance.sample(range(1000), len(parents)))
    levels = max(tree.depths)
    chosen, wanted, node = [1000] * len(parents), [], 0  # a token that was not guessed
    while tree.children(node) and chance.random() < 0.8:
        child = chance.choice(tree.children(node))
        chosen[node] = tree.tokens[child]
        wanted.append(child)
        node = child
    tokens = torch.tensor([tree.tokens])
    path, counts = forest.walk(tokens, torch.tensor([parents]), torch.tensor([chosen]), levels)
    assert counts.tolist() == [len(wanted)]
    assert path[0].tolist() == wanted + [0] * (levels - len(wanted))


def test_a_pool_offers_the_likeliest_nodes_and_their_parents() -> None:
    torch.manual_seed(1)
    lanes, branch, widths = 3, 4, [1, 4, 5]
    pool = Pool(lanes, widths, branch, "cpu")
    nodes = pool.begin()
    grown: list[list[tuple[float, int, int]]] = [[] for _ in range(lanes)]  # (score, place of the parent, token)
    for level, width in enumerate(widths):
        logs = torch.log_softmax(2 * torch.randn(lanes * width, branch), -1)
        logs[:, 0] = 0.0  # sure: as likely as its parent, which has to come first all the same
        tokens = torch.randint(0, 1000, (lanes * width, branch))
        followed = pool.grow(level, nodes, logs, tokens, torch.arange(1000))
        for lane in range(lanes):
            for place, score, line in zip(
                nodes.places[lane].tolist(),
                nodes.scores[lane].tolist(),
                range(lane * width, (lane + 1) * width),
                strict=True,
            ):
                grown[lane] += [
                    (score + log, place, token)
                    for log, token in zip(logs[line].tolist(), tokens[line].tolist(), strict=True)
                ]
        assert (followed is None) == (level + 1 == len(widths))
        if followed is not None:
            nodes = followed
            assert nodes.places.shape == (lanes, widths[level + 1])
    tokens, parents, _, _ = pool.best(12)
    for lane in range(lanes):
        order = sorted(range(len(grown[lane])), key=lambda place: (-round(grown[lane][place][0], 5), place))[:12]
        numbers = {0: 0} | {place + 1: number for number, place in enumerate(sorted(order), 1)}
        wanted = [(grown[lane][p][2], numbers[grown[lane][p][1]]) for p in sorted(order)]
        assert list(zip(tokens[lane].tolist(), parents[lane].tolist(), strict=True)) == wanted


def test_noise_is_read_by_the_names_of_the_tokens() -> None:
    torch.manual_seed(2)
    key, ids = noise.key(3, 0, 17, noise.MATCH), torch.tensor([4, 9, 30, 31, 77])
    logits = torch.randn(1, 5)
    sampling = SamplingNoise(torch.tensor([0.8]), noise.halves([key]), ids)
    scores, indices = forest.likeliest_tokens(logits, 5, sampling)
    drawn = (logits[0] / 0.8).double() + noise.gumbel(key, ids)
    assert indices[0].tolist() == drawn.argsort(descending=True).tolist()
    assert torch.allclose(scores[0].double(), torch.log_softmax(drawn, 0)[indices[0]], atol=1e-5)
