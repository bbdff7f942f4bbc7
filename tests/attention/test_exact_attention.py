"""Batch-invariant attention: correct, and bit for bit what plain decoding computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.attention import Segment, exact_paged, tree_segment
from slipstream.attention.exact_paged import without_trunk
from slipstream.cache import PageTable
from slipstream.tree import TokenTree
from tests.attention.exact_attention import Pass, random_tree


@pytest.mark.kernels
def test_attention_agrees_with_float64(fresh_memory_is_nan: None) -> None:
    """Random trees, levels of trees, pieces of prompts and single tokens in one pass, at ends of blocks and shares."""
    for seed, options in enumerate(
        (
            {"kv_heads": 1},
            {"heads": 9, "kv_heads": 3, "window": 40},
            {"kv_heads": 1, "size": 24, "dtype": torch.float16, "window": 130, "softcap": 20.0},
        )
    ):
        one = Pass(seed=seed, **options)
        one.add(250, 1, random_tree(one.chooser, 8))
        one.add(64, 3, random_tree(one.chooser, 40), 37)
        one.add(122, 7, random_tree(one.chooser, 3))
        one.add(300, 1, TokenTree(1))
        one.add(0, 3, None)
        q = one.queries(sum(s.rows for s in one.segments))
        answer = one.attend(one.segments, q).double().cpu()
        bound = 4e-3 if one.dtype == torch.float16 else 2e-5
        assert (answer - one.truth(q)).abs().max() <= bound, options
        if one.window is not None:  # the check would notice
            one.window += 1
            assert (answer - one.truth(q)).abs().max() > bound, options


@pytest.mark.kernels
def test_every_node_has_the_bits_of_plain_decoding(fresh_memory_is_nan: None) -> None:
    """Every node alone, as if its path had been decoded plainly; trees cross ends of blocks (64) and shares (256)."""
    for seed, options in enumerate(
        ({"kv_heads": 1}, {"heads": 3, "kv_heads": 1, "window": 90, "softcap": 8.0, "dtype": torch.float16})
    ):
        one = Pass(seed=seed, **options)
        for committed, pending, nodes, first in ((252, 1, 11, 0), (61, 4, 5, 0), (508, 1, 11, 7), (0, 1, 3, 0)):
            one.add(committed, pending, random_tree(one.chooser, nodes), first)
        one.add(255, 3, None)
        rows = sum(s.rows for s in one.segments)
        q = one.queries(rows)
        together = one.attend(one.segments, q)
        exact_paged._PARTS_BYTES, exact_paged._PROGRAMS = 1, 1  # other programs, in turns: no other bits
        assert torch.equal(together, one.attend(one.segments, q))
        exact_paged._PARTS_BYTES, exact_paged._PROGRAMS = 2**26, 1024
        start = 0
        for segment in one.segments:
            for row in range(segment.rows):
                mine = slice(start + row, start + row + 1)
                assert torch.equal(one.alone(segment, row, q[mine]), together[mine]), (options, segment.committed, row)
            start += segment.rows


@pytest.mark.kernels
def test_lanes_have_the_bits_of_passes_that_the_host_lays_out(fresh_memory_is_nan: None) -> None:
    one = Pass(seed=5, heads=4, kv_heads=1)
    trees = [random_tree(one.chooser, 33) for _ in range(2)]
    for committed, tree in zip((0, 250), trees, strict=True):
        one.add(committed, 1, tree)
    q = one.queries(2 * 34)
    answer = one.attend_lanes(trees, q)
    assert torch.equal(answer, one.attend(one.segments, q))
    assert (answer.double().cpu() - one.truth(q)).abs().max() < 2e-5


def _sees(segment: Segment) -> list[list[int]]:
    """The slots that each row sees."""
    return [
        [*range(segment.committed), *(segment.committed + np.flatnonzero(line)).tolist()] for line in segment.visible
    ]


def test_a_segment_without_its_trunk_has_the_same_rows() -> None:
    tree = TokenTree.chain(1, range(2, 6))
    for node in range(12):
        tree.add(2 + node, 50 + node)
    table = PageTable([4, 2])
    chain = TokenTree.chain(1, range(2, 9))
    for segment, parts in (
        (tree_segment(table, 100, [7, 8, 1], tree), 2),
        (tree_segment(table, 100, [7, 1], tree, 1), 2),
        (tree_segment(table, 100, [7, 1], tree, 9), 1),
        (tree_segment(table, 100, [1], chain), 1),
        (tree_segment(table, 100, [1], chain, 4), 1),
        (tree_segment(table, 100, [7, 8], None), 1),
    ):
        found = list(without_trunk(segment))
        assert len(found) == parts
        assert [token for part in found for token in part.tokens] == segment.tokens
        assert [slot for part in found for slot in part.slots.tolist()] == segment.slots.tolist()
        assert [place for part in found for place in part.positions.tolist()] == segment.positions.tolist()
        assert [line for part in found for line in _sees(part)] == _sees(segment)
        assert all(part.causal or part.visible.shape[1] < segment.visible.shape[1] for part in found)
