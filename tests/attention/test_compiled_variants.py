"""A warm-up launches every variant of the paged kernels that passes of the host can meet."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from slipstream.attention import Segment, tree_segment
from slipstream.attention.paged import PagedAttention, compile_kernels
from slipstream.cache import PagedCache
from slipstream.tree import TokenTree

pytestmark = pytest.mark.kernels

HEADS, KV_HEADS, SIZE = 8, 2, 16


class Noted:
    """In place of a kernel: the constants that it is launched with."""

    def __init__(self) -> None:
        self.variants: set[tuple[tuple[str, Any], ...]] = set()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.variants.add(tuple(sorted(constants.items())))


def test_every_variant_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.attention import paged_kernels

    cache = PagedCache(600, "cpu")
    cache.add_store("here", 1, 2, KV_HEADS, SIZE, torch.float32)
    (layer,) = cache.layers("here")
    kernels = {name: Noted() for name in ("attend", "combine")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(paged_kernels, name, kernel)
    compile_kernels(HEADS, KV_HEADS, SIZE, None, layer, None)
    compiled = {name: set(kernel.variants) for name, kernel in kernels.items()}

    tree = TokenTree(1)
    for token in (2, 3):
        tree.add(0, token)

    def segment(rows: int) -> Segment:
        table = cache.open([])
        cache.reserve(table, rows + 4)
        return tree_segment(table, 0, list(range(rows)), tree if rows == 4 else None)

    for count, rows in itertools.product((1, 2, 3, 5, 9, 40), (1, 2, 4, 7, 20, 70, 200)):
        segments = [segment(rows) for _ in range(count)]
        q = torch.zeros(sum(s.rows for s in segments), (HEADS + 2 * KV_HEADS) * SIZE)
        PagedAttention(segments, HEADS, KV_HEADS, SIZE, "cpu")(q, layer, None)
        for each in segments:
            cache.release(each.table)
    for name, kernel in kernels.items():
        assert kernel.variants == compiled[name], name
    assert len(compiled["attend"]) < 12, "each takes a second"
