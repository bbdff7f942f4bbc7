# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `forest.py`. Importing this file imports triton: only `forest.py` does, and only on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from slipstream.choice_kernels import GREEDY, gumbel

if TYPE_CHECKING:
    from slipstream.forest import Warmth


@triton.jit
def _geometry(parents, depths, bits, nodes, LEVELS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """One lane and one word of bits."""
    lane, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    node = tl.arange(0, BLOCK)
    inside = node < nodes
    above = node.to(tl.int64)
    depth = tl.zeros([BLOCK], tl.int64)
    seen = tl.where((above >> 5) == word, 1 << (above & 31).to(tl.int32), 0)
    for _ in tl.static_range(LEVELS):
        depth += (above > 0).to(tl.int64)
        above = tl.load(parents + lane * nodes + above, mask=inside, other=0)
        seen = seen | tl.where((above >> 5) == word, 1 << (above & 31).to(tl.int32), 0)
    tl.store(bits + (lane * nodes + node) * WORDS + word, seen, mask=inside)
    if word == 0:
        tl.store(depths + lane * nodes + node, depth, mask=inside)


def geometry(parents: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths and bits of the trees with these parents, int64 [lanes, nodes]."""
    lanes, nodes = parents.shape
    words = -(-nodes // 32)
    depths = torch.empty_like(parents)
    bits = torch.empty(lanes, nodes, words, dtype=torch.int32, device=parents.device)
    block = triton.next_power_of_2(nodes)
    _geometry[lanes, words](parents, depths, bits, nodes, LEVELS=levels, WORDS=words, BLOCK=block, num_warps=2)
    return depths, bits


@triton.jit
def _walk(tokens, parents, chosen, path, counts, nodes, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """One lane."""
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < nodes
    token = tl.load(tokens + lane * nodes + node, mask=inside, other=-1)
    parent = tl.load(parents + lane * nodes + node, mask=inside, other=-1)
    at = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    alive = at == 0
    for level in tl.static_range(LEVELS):
        wanted = tl.load(chosen + lane * nodes + at)
        fits = (node > 0) & (parent == at) & (token == wanted)
        found = tl.min(tl.where(fits, node, BLOCK), 0)
        alive = alive & (found < BLOCK)
        at = tl.where(alive, found, 0).to(tl.int64)
        count += alive.to(tl.int64)
        tl.store(path + lane * LEVELS + level, at)
    tl.store(counts + lane, count)


def walk(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The accepted paths and their lengths."""
    lanes, nodes = tokens.shape
    path = tokens.new_empty(lanes, levels)
    counts = tokens.new_empty(lanes)
    block = triton.next_power_of_2(nodes)
    _walk[(lanes,)](tokens, parents, chosen, path, counts, nodes, LEVELS=levels, BLOCK=block, num_warps=1)
    return path, counts


@triton.jit(do_not_specialize=["rows"])
def _likeliest(
    logits,  # [rows, tokens]
    temperatures,  # float32 [rows]
    keys,  # int64 [2, rows]
    ids,  # int64 [tokens]
    scores,  # float32 [rows, COUNT]
    indices,  # int64 [rows, COUNT]
    rows,
    tokens,
    stride,
    COUNT: tl.constexpr,
    WARM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its logits, warmed and with noise where it is sampled, their sum, and the highest of them."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < tokens
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if WARM:
        temperature = tl.load(temperatures + row)
        if temperature >= GREEDY:
            low = tl.load(keys + row).to(tl.uint32)
            high = tl.load(keys + rows + row).to(tl.uint32)
            names = tl.load(ids + token, mask=inside, other=0)
            values = values / temperature + gumbel(names, low, high).to(tl.float32)
    top = tl.max(values, 0)
    whole = tl.log(tl.sum(tl.exp(values - top), 0)) + top
    for rank in tl.static_range(COUNT):
        best, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(scores + row * COUNT + rank, best - whole)
        tl.store(indices + row * COUNT + rank, where.to(tl.int64))
        values = tl.where(token == where, float("-inf"), values)


def likeliest(logits: torch.Tensor, count: int, warmth: Warmth | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row [rows, tokens]: logarithms of probabilities, and indices, [rows, count] each."""
    rows, tokens = logits.shape
    scores = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    warm = (logits, logits, logits) if warmth is None else (warmth.temperatures, warmth.keys, warmth.ids)
    block = triton.next_power_of_2(tokens)
    _likeliest[(rows,)](
        *(logits, *warm, scores, indices, rows, tokens, logits.stride(0)),
        COUNT=count,
        WARM=warmth is not None,
        BLOCK=block,
        num_warps=8,
    )
    return scores, indices


@triton.jit
def _highest(scores, chosen, size, stride, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """One row: a number is among the highest if few enough are above it, and its place is how many such stand before.

    Everything is compared with everything: that is quicker than sorting a few hundred numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    mine = tl.arange(0, BLOCK)
    inside = mine < size
    score = tl.load(scores + row * stride + mine, mask=inside, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    rank = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, BLOCK, STEP):
        other = start + tl.arange(0, STEP)
        against = tl.load(scores + row * stride + other, mask=other < size, other=float("-inf"))
        against = tl.where(against == against, against, float("-inf"))
        above = (against[None, :] > score[:, None]) | (
            (against[None, :] == score[:, None]) & (other[None, :] < mine[:, None])
        )
        rank += tl.sum((above & (other < size)[None, :]).to(tl.int32), 1)
    taken = inside & (rank < count)
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen + row * count + place, mine.to(tl.int64), mask=taken)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Which are the highest of each row [rows, size], int64 [rows, count], ascending; of equals the first."""
    rows, size = scores.shape
    chosen = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    block = triton.next_power_of_2(size)
    _highest[(rows,)](scores, chosen, size, scores.stride(0), count, BLOCK=block, STEP=min(32, block), num_warps=8)
    return chosen
