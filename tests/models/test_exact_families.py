"""Bit for bit, for every family: each node of a random tree has the logits of plain decoding along its path."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from slipstream.attention import tree_segment
from slipstream.attention.even import soft_cap
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.models.decoder import Decoder
from slipstream.models.layers.mlp import even_gelu
from slipstream.models.load import load_model
from slipstream.models.selfcheck import is_exact
from slipstream.tree import TokenTree
from tests.models.test_exact import STORE, feed, random_tree
from tests.models.test_families import build

WINDOW = 100  # ends within a block, wherever it begins
# The families that bring kernels of their own, with the heads that their real models have: 256 wide, one for all.
CASES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": WINDOW},
    "gemma2-untied": {"sliding_window": WINDOW, "head_dim": 256, "num_key_value_heads": 4, "vocab_size": 224},
    "gemma3": {"sliding_window": WINDOW, "head_dim": 256, "num_key_value_heads": 1},
    "gemma3-untied": {"sliding_window": WINDOW},
    "qwen3": {},
    "mixtral": {},
    "qwen3moe": {},
    "qwen3moe-dense": {"num_experts_per_tok": 5},
    "olmoe": {},
    "olmoe-clip": {},
}


def load(name: str, folder: Path) -> Decoder:
    build(name, folder, noise=0.15, **CASES[name])  # sharp enough that attention is not uniform
    return load_model(folder, dtype="float32", device="cpu")[0]


def differing_nodes(model: Decoder, chooser: random.Random, length: int) -> int:
    """A random tree after `length` tokens: its nodes whose logits are not those of their path, token by token."""
    vocab = model.config.vocab_size
    context = [chooser.randrange(vocab) for _ in range(length)]
    tree = random_tree(chooser, chooser.randrange(vocab), chooser.choice([3, 12, 40]), vocab)
    cache = PagedCache(12)
    model.add_store(cache, STORE)
    together, alone = cache.open([]), cache.open([])
    for table in (together, alone):
        cache.reserve(table, length + len(tree))
    feed(model, cache, together, context, [chooser.choice([1, 3, 64, 128, 256]) for _ in range(5)])
    feed(model, cache, alone, context, [chooser.choice([7, 128, 500])])
    rows = model.forward(cache, STORE, [tree_segment(together, length, [tree.tokens[0]], tree)]).logits
    left, seen, wrong = [0], 0, 0
    while left:  # depth first: the ancestors of the node follow the context, whatever was tried before
        node = left.pop()
        left += tree.children(node)
        token, slot = tree.tokens[node], length + tree.depths[node]
        plain = model.forward(cache, STORE, [tree_segment(alone, slot, [token], TokenTree(token))])
        wrong += not torch.equal(plain.logits[0], rows[node])
        seen += 1
    assert seen == len(tree)
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_tree_nodes_have_the_bits_of_plain_decoding(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    chooser = random.Random(5)
    edges = [WINDOW - 2, PAGE_SIZE - 3, PAGE_SIZE, PAGE_SIZE + WINDOW - 1, 2 * PAGE_SIZE - 1, 3 * PAGE_SIZE + 5]
    with torch.inference_mode():
        assert is_exact(model)
        assert sum(differing_nodes(model, chooser, length) for length in edges) == 0


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3moe"])
def test_the_number_of_threads_does_not_matter(name: str, threads: int, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            assert differing_nodes(model, random.Random(threads), 2 * PAGE_SIZE - 9) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [96, 1536, 16_416, 33_024])
def test_gelu_does_not_depend_on_how_threads_split_the_rows(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gate = torch.randn(33, width * 2)[:, :width] * 5
        alone = torch.cat([even_gelu(row) for row in gate.split(1)])
        assert torch.equal(even_gelu(gate), alone)
        torch.testing.assert_close(alone, functional.gelu(gate, approximate="tanh"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [7, 211, 4096, 40_001])
def test_a_soft_cap_does_not_depend_on_the_other_rows(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(19, width) * 40
        together = soft_cap(logits.clone(), 30.0)
        assert together.shape == logits.shape
        assert torch.equal(together, torch.cat([soft_cap(row.clone(), 30.0) for row in logits.split(1)]))
        torch.testing.assert_close(together, 30.0 * torch.tanh(logits / 30.0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmoe"])
def test_several_sequences_in_one_pass_have_the_bits_that_each_has_alone(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    chooser = random.Random(9)
    cache = PagedCache(16)
    model.add_store(cache, STORE)
    with torch.inference_mode():
        segments = []
        for length in (0, 5, PAGE_SIZE - 1, PAGE_SIZE + WINDOW):
            table = cache.open([])
            cache.reserve(table, length + 40)
            feed(model, cache, table, [chooser.randrange(211) for _ in range(length)], [64])
            segments.append(tree_segment(table, length, [1], random_tree(chooser, 1, chooser.choice([1, 9, 30]), 211)))
        together = model.forward(cache, STORE, segments).logits
        alone = torch.cat([model.forward(cache, STORE, [segment]).logits for segment in segments])
    assert torch.equal(together, alone)
