"""A lone row after full pages takes a shorter path through attention, to the same bits."""

from __future__ import annotations

import pytest
import torch

from slipstream.attention import BlockAttention, tree_segment
from slipstream.attention.blocks import _SegmentPlan
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.tree import TokenTree

KV_HEADS, GROUP, SIZE = 2, 4, 64


@pytest.mark.parametrize("context", [130, 200, 255, 700])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_pages_in_a_line_give_the_bits_of_the_general_way(
    context: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(context)
    cache = PagedCache(context // PAGE_SIZE + 2)
    shape = (1, 2, cache.capacity + 1, KV_HEADS, PAGE_SIZE, SIZE)
    cache.stores["kv"] = torch.randn(shape)
    table = cache.open([])
    cache.reserve(table, context + 1)
    segment = tree_segment(table, context, [7], TokenTree(7))
    q = torch.randn(1, KV_HEADS * GROUP * SIZE)

    def attend() -> torch.Tensor:
        attention = BlockAttention([segment], KV_HEADS * GROUP, KV_HEADS, SIZE, "cpu", softcap)
        assert (attention._plans[0].view(None).line is not None) is short
        return attention(q, cache.layers("kv")[0], None)

    short = True
    in_one_go = attend()
    short = False
    monkeypatch.setattr(_SegmentPlan, "_line", lambda plan, runs: None)
    assert torch.equal(in_one_go, attend())
