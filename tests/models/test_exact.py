"""Bit for bit: a token's logits are batch-invariant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.attention import tree_segment
from slipstream.cache import PagedCache, PageTable
from slipstream.models.decoder import Decoder
from slipstream.models.layers import linear
from slipstream.models.layers.mlp import even_silu
from slipstream.models.load import load_model
from slipstream.models.selfcheck import is_exact
from slipstream.native import machine
from slipstream.tree import TokenTree
from tests.tiny import tiny_directory

STORE = "test"
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one query head per KV head": {"heads": 4, "kv_heads": 4},
    "one KV head of 64": {"heads": 4, "kv_heads": 1, "head_dim": 64},
    "heads of 128": {"heads": 8, "kv_heads": 2, "head_dim": 128},
    "heads of 80": {"heads": 6, "kv_heads": 2, "head_dim": 80},
    "sliding window": {"sliding_window": 100},
}


def random_tree(chooser: random.Random, root: int, nodes: int, vocab: int) -> TokenTree:
    tree = TokenTree(root)
    while len(tree) <= nodes:
        tree.add(chooser.randrange(max(0, len(tree) - 6), len(tree)), chooser.randrange(vocab))
    return tree


def feed(model: Decoder, cache: PagedCache, table: PageTable, tokens: list[int], sizes: list[int]) -> None:
    """Feed a prompt in chunks of the given sizes, over and over."""
    done = 0
    while done < len(tokens):
        chunk = tokens[done : done + sizes[done % len(sizes)]]
        model.forward(cache, STORE, [tree_segment(table, done, chunk, None)])
        done += len(chunk)


def differing_nodes(model: Decoder, chooser: random.Random, longest: int) -> int:
    """Compare a random tree after a random context with one of its paths, decoded token by token."""
    vocab = model.config.vocab_size
    context = [chooser.randrange(vocab) for _ in range(chooser.randrange(1, longest))]
    tree = random_tree(chooser, chooser.randrange(vocab), chooser.choice([2, 5, 12, 40, 64, 150]), vocab)
    cache = PagedCache(24)
    model.add_store(cache, STORE)
    together, alone = cache.open([]), cache.open([])
    for table in (together, alone):
        cache.reserve(table, len(context) + 200)
    feed(model, cache, together, context, [chooser.choice([1, 3, 64, 128, 256]) for _ in range(5)])
    feed(model, cache, alone, context, [chooser.choice([7, 128, 500])])
    rows = model.forward(cache, STORE, [tree_segment(together, len(context), [tree.tokens[0]], tree)]).logits
    differing = 0
    for step, node in enumerate([0, *tree.path(chooser.randrange(len(tree)))]):
        token = tree.tokens[node]
        segment = tree_segment(alone, len(context) + step, [token], TokenTree(token))
        differing += not torch.equal(model.forward(cache, STORE, [segment]).logits[0], rows[node])
    return differing


@pytest.mark.parametrize("shape", SHAPES)
def test_tree_nodes_have_the_bits_of_plain_decoding(shape: str) -> None:
    model, _ = load_model(tiny_directory(context=2048, **SHAPES[shape]), dtype="float32", device="cpu")
    assert is_exact(model)
    chooser = random.Random(7)
    with torch.inference_mode():
        assert sum(differing_nodes(model, chooser, 700) for _ in range(25)) == 0


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    model, _ = load_model(tiny_directory(context=2048, heads=6, kv_heads=3), dtype="float32", device="cpu")
    chooser = random.Random(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            assert sum(differing_nodes(model, chooser, 700) for _ in range(8)) == 0
    finally:
        torch.set_num_threads(before)


def test_several_sequences_in_one_pass_have_the_bits_that_each_has_alone() -> None:
    model, _ = load_model(tiny_directory(), dtype="float32", device="cpu")
    chooser = random.Random(3)
    cache = PagedCache(40)
    model.add_store(cache, STORE)
    with torch.inference_mode():
        segments = []
        for length in (0, 5, 127, 128, 300):
            table = cache.open([])
            cache.reserve(table, length + 80)
            feed(model, cache, table, [chooser.randrange(97) for _ in range(length)], [64])
            tree = random_tree(chooser, 1, chooser.choice([1, 9, 60]), 97)
            segments.append(tree_segment(table, length, [1], tree))
        together = model.forward(cache, STORE, segments).logits
        alone = torch.cat([model.forward(cache, STORE, [segment]).logits for segment in segments])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", [linear.PackedLinear, linear.TiledLinear])
@pytest.mark.parametrize(("inner", "outer"), [(32, 16), (64, 97), (576, 960), (1536, 576)])
def test_products_give_a_row_the_same_bits_in_any_batch(kind: Any, inner: int, outer: int) -> None:
    if kind is linear.PackedLinear and not linear.packing_works():
        pytest.skip("no packed GEMMs in this build")
    weight, bias, x = torch.randn(outer, inner), torch.randn(outer), torch.randn(70, inner)
    product = kind(weight, bias)
    alone = torch.cat([product(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(alone, x @ weight.T + bias, atol=1e-3, rtol=1e-4)
    for rows in (2, 3, 4, 7, 8, 9, 16, 31, 64, 70):
        assert torch.equal(product(x[:rows].contiguous()), alone[:rows])


def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine for which there are no kernels of our own."""
    monkeypatch.setattr(machine, "machine", lambda: None)
    linear.native_works.cache_clear()


@pytest.fixture(autouse=True)
def native_again() -> Iterator[None]:
    yield
    linear.native_works.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_path_without_kernels_of_our_own_is_exact_too(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_native(monkeypatch)
    model, _ = load_model(tiny_directory(seed=5, **SHAPES[shape]), dtype="float32", device="cpu")
    assert model.native is None and isinstance(model.layers[0].qkv, linear.PackedLinear | linear.TiledLinear)
    assert is_exact(model)
    chooser = random.Random(12)
    with torch.inference_mode():
        assert sum(differing_nodes(model, chooser, 300) for _ in range(5)) == 0


def test_the_path_without_packed_products_is_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    without_native(monkeypatch)
    monkeypatch.setattr(linear, "packing_works", lambda: False)
    model, _ = load_model(tiny_directory(seed=5), dtype="float32", device="cpu")
    assert isinstance(model.layers[0].qkv, linear.TiledLinear)
    assert is_exact(model)
    chooser = random.Random(11)
    with torch.inference_mode():
        assert sum(differing_nodes(model, chooser, 300) for _ in range(10)) == 0


def test_the_self_check_notices_products_that_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.weights.make_linear", linear.PlainLinear)
    monkeypatch.setattr(linear.PlainLinear.__init__, "__defaults__", (None,))
    model, _ = load_model(tiny_directory(seed=5, head_dim=64), dtype="float32", device="cpu")
    assert not is_exact(model)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [96, 1536, 2752])
def test_silu_does_not_depend_on_how_threads_split_the_rows(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gate = torch.randn(333, width * 2)[:, :width] * 5
        alone = torch.cat([even_silu(gate[i : i + 1]) for i in range(len(gate))])
        assert torch.equal(even_silu(gate), alone)
    finally:
        torch.set_num_threads(before)
