"""Checks, on the loaded model itself, that a model of transformers does what the adapter needs.

The model's own plain continuation of a text is compared with the same tokens as one path of a tree with siblings. If
the model ignored the mask or the positions, counted slots instead, or used a window that its config does not declare,
the logits would differ. This is done after a few rows, where each has a large weight, and after many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from slipstream.models.adapter import Adapter

_STORE = "check"
_PROMPT, _DEPTH, _SIBLINGS = 8, 4, 8
_FAR = 2048  # rows: learned positions and masks of a fixed size end with the context, seldom later than this
_EDGE, _WEIGHT = (
    16,
    256,
)  # the oldest rows, and the largest factor on their values: a window that is one row off must show
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, {torch.float16: 0.02, torch.bfloat16: 0.05}


def require_tree_support(adapter: Adapter, model: Any, checkpoint: AdapterCheckpoint) -> None:
    """Raise UnsupportedModel unless the path of a tree has the logits of the model's own plain decoding."""
    context = adapter.config.context
    if context < _PROMPT + _DEPTH:
        raise checkpoint.refuse(f"has a context of {context} tokens", hint=f"{_PROMPT + _DEPTH} at least")
    edges = {window + _EDGE // 2 for window in adapter.config.windows if window}
    most = context - 1 - _DEPTH
    with torch.inference_mode(), checkpoint.asking("does not run over pages"):
        for committed in sorted({_PROMPT - 1, *(min(rows, most) for rows in (*edges, _FAR))}):
            error = _difference(adapter, model, committed)
            if not error <= _TOLERANCE_16_BIT.get(adapter.dtype, _TOLERANCE):
                raise checkpoint.refuse(
                    "does not honour 4-D masks and position ids",
                    hint=f"after {committed} tokens the logits of a tree are off by {error:.1%}",
                )


def _difference(adapter: Adapter, model: Any, committed: int) -> float:
    """The relative difference between the logits along a path and the model's own."""
    vocabulary = adapter.config.vocab_size
    prompt = [(7 * i + 3) % vocabulary for i in range(_PROMPT - 1)]
    tree, path = _tree(vocabulary)
    tokens = [tree.tokens[node] for node in path]

    cache = PagedCache(-(-(committed + len(tree)) // PAGE_SIZE), adapter.device)
    adapter.add_store(cache, _STORE)
    table = cache.open([])
    cache.reserve(table, committed + len(tree))
    adapter.forward(cache, _STORE, [tree_segment(table, 0, prompt, None)])
    if committed == len(prompt):
        plain = model(torch.tensor([prompt + tokens], device=adapter.device)).logits
    else:
        past = DynamicCache()
        for index, data in enumerate(cache.stores[_STORE]):
            keys, values = _repeat(data, len(prompt), committed)
            past.update(keys[..., : adapter.config.key_width], values[..., : adapter.config.value_width], index)
        plain = model(torch.tensor([tokens], device=adapter.device), past_key_values=past, use_cache=True).logits
    expected = plain[0, -len(path) :, :vocabulary].float()
    segment = tree_segment(table, committed, [tree.tokens[0]], tree)
    found = adapter.forward(cache, _STORE, [segment]).logits[path].float()
    return float((found - expected).norm() / (expected - expected.mean(1, keepdim=True)).norm())


def _tree(vocabulary: int) -> tuple[TokenTree, list[int]]:
    """A tree with many siblings on every level, and the path of the last of each: its slots are not its positions."""
    tree = TokenTree(2 % vocabulary)
    path = [0]
    for level in range(_DEPTH):
        tokens = [(31 * level + 11 * sibling + 5) % vocabulary for sibling in range(_SIBLINGS)]
        path.append([tree.add(path[-1], token) for token in tokens][-1])
    return tree, path


def _repeat(data: torch.Tensor, rows: int, committed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill one layer, [2, pages, kv heads, PAGE_SIZE, size], with copies of its first rows; returns K and V of all.

    The oldest values get as much weight as all others together, so that a row that sees them wrongly shows it. The
    cache holds one sequence, so its pages are in order.
    """
    by_head = data.transpose(1, 2)
    flat = by_head.flatten(2, 3).clone()  # [2, kv heads, slots, size]
    copies = flat[:, :, :rows].repeat(1, 1, -(-committed // rows), 1)
    flat[:, :, :committed] = copies[:, :, :committed]
    flat[1, :, :_EDGE] *= min(_WEIGHT, committed / _EDGE)
    by_head.copy_(flat.view(by_head.shape))
    keys, values = flat[:, None, :, :committed]
    return keys, values
