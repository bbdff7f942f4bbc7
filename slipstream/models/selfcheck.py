"""Checks whether the kernels are batch-invariant on this machine: once at load, in milliseconds."""

from __future__ import annotations

import itertools

import torch

from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.models.config import ModelConfig
from slipstream.models.model import Model
from slipstream.tree import TokenTree

_STORE = "check"


def is_exact(model: Model) -> bool:
    """Compare a tree's logits bitwise with plain decoding of one of its paths: a layer of each kind, and the head.

    The tree follows a prompt that ends just before a block boundary, so that it crosses it (if the context is that
    long). A model that is not layered runs as a whole, and the first row that differs ends the check.
    """
    if not (model.exact or (model.dtype == torch.float32 and model.device == "cpu")):
        return False
    cache = PagedCache(4, model.device)
    config = model.config
    cache.add_store(_STORE, config.layers, 2, config.kv_heads, config.head_dim, model.dtype)
    layers = _one_of_each_kind(config) if model.layered else None
    tree = TokenTree(3 % config.vocab_size)
    for number in range(23):
        last = len(tree) - 1  # with few tokens some children may exist already
        tree.add(last // 2 if number % 3 else last, (11 * number + 5) % config.vocab_size)
    leaf = len(tree) - 1
    before = min(PAGE_SIZE - 4, max(1, config.context - 1 - tree.depth))
    prompt = [(7 * i + 3) % config.vocab_size for i in range(before)]

    def logits(pending: list[int], grown: TokenTree | None) -> torch.Tensor:
        segment = tree_segment(table, table.lengths[_STORE], pending, grown)
        result = model.forward(cache, _STORE, [segment], layers=layers).logits
        table.lengths[_STORE] += len(pending)
        return result

    table = cache.open([])
    cache.reserve(table, 2 * PAGE_SIZE)
    logits(prompt, None)
    together = logits([tree.tokens[0]], tree)
    cache.truncate(table, _STORE, before)
    path = [0, *tree.path(leaf)]
    alone = (logits([tree.tokens[node]], TokenTree(tree.tokens[node]))[0] for node in path)
    return all(torch.equal(together[node], row) for node, row in zip(path, alone, strict=True))


def _one_of_each_kind(config: ModelConfig) -> list[int]:
    """The first layer, and the first with another kind of MLP, if there is one."""
    others = (layer for layer in range(config.layers) if config.mixture(layer) != config.mixture(0))
    return [0, *itertools.islice(others, 1)]
