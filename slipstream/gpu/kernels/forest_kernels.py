# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `forest.py`. Importing this file imports triton: only `forest.py` does, and only on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from slipstream.gpu.kernels.sampling_kernels import GREEDY, near_gumbel

if TYPE_CHECKING:
    from slipstream.gpu.forest import Followed, Pool, SamplingNoise


@triton.jit
def _geometry(parents, depths, bits, nodes, LEVELS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Depths, and one word of ancestor bits, of one lane."""
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
    """Depths and ancestor bits of the trees with these parents, int64 [lanes, nodes]."""
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


@triton.jit
def _join(
    chain_tokens,  # int64 [lanes, LENGTH]
    chain_scores,  # float32 [lanes, LENGTH]
    pool_scores,  # float32 [lanes, size]
    pool_tokens,  # int64 [lanes, size]
    pool_parents,  # int64 [lanes, size]
    grown,  # nodes of the pool that are not a chain's
    size,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One lane."""
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < grown
    score = tl.load(pool_scores + lane * size + node, mask=inside, other=float("-inf"))
    token = tl.load(pool_tokens + lane * size + node, mask=inside, other=-1)
    parent = tl.load(pool_parents + lane * size + node, mask=inside, other=-1)
    at = tl.zeros([], tl.int64)
    for step in tl.static_range(LENGTH):
        wanted = tl.load(chain_tokens + lane * LENGTH + step)
        joint = tl.load(chain_scores + lane * LENGTH + step)
        fits = (parent == at) & (token == wanted)
        score = tl.where(fits, tl.maximum(score, joint), score)
        found = tl.min(tl.where(fits, node, BLOCK), 0)
        there = found < BLOCK
        here = lane * size + grown + step
        tl.store(pool_scores + here, tl.where(there, float("-inf"), joint))
        tl.store(pool_tokens + here, wanted)
        tl.store(pool_parents + here, at)
        at = (tl.where(there, found, grown + step) + 1).to(tl.int64)
    tl.store(pool_scores + lane * size + node, score, mask=inside)


def join(pool: Pool, tokens: torch.Tensor, scores: torch.Tensor) -> None:
    """`Pool.join`."""
    lanes, length = tokens.shape
    grown = pool.starts[-1]
    block = triton.next_power_of_2(grown)
    _join[(lanes,)](
        *(tokens, scores, pool.scores, pool.tokens, pool.parents, grown, len(pool)),
        LENGTH=length,
        BLOCK=block,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["each", "apart"])
def _likeliest(
    logits,  # [rows, tokens]
    temperatures,  # float32 [entries]
    keys,  # int64 [2, entries]
    ids,  # int64 [tokens]
    scores,  # float32 [rows, COUNT]
    indices,  # int64 [rows, COUNT]
    each,  # rows of an entry
    apart,  # numbers between the two halves of a key
    tokens,
    stride,
    COUNT: tl.constexpr,
    WARM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its logits over the temperature, plus noise if it is sampled, their sum, and the highest of them.

    The noise of a draft may be inexact: in float32 it costs a fraction, and a wrong rank costs a guess at most.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < tokens
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if WARM:
        entry = row // each
        temperature = tl.load(temperatures + entry)
        if temperature >= GREEDY:
            low = tl.load(keys + entry).to(tl.uint32)
            high = tl.load(keys + apart + entry).to(tl.uint32)
            names = tl.load(ids + token, mask=inside, other=0)
            values = values / temperature + near_gumbel(names, low, high)
    top = tl.max(values, 0)
    whole = tl.log(tl.sum(tl.exp(values - top), 0)) + top
    for rank in tl.static_range(COUNT):
        best, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(scores + row * COUNT + rank, best - whole)
        tl.store(indices + row * COUNT + rank, where.to(tl.int64))
        values = tl.where(token == where, float("-inf"), values)


def likeliest_tokens(
    logits: torch.Tensor, count: int, sampling: SamplingNoise | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens of each row [rows, tokens]: log-probabilities and indices, [rows, count] each."""
    rows, tokens = logits.shape
    scores = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    warm, each, apart = (logits, logits, logits), 1, 0
    if sampling is not None:
        warm, each = (sampling.temperatures, sampling.keys, sampling.ids), rows // len(sampling.temperatures)
        apart = sampling.keys.stride(0)
    block = triton.next_power_of_2(tokens)
    _likeliest[(rows,)](
        *(logits, *warm, scores, indices, each, apart, tokens, logits.stride(0)),
        COUNT=count,
        WARM=sampling is not None,
        BLOCK=block,
        num_warps=8,
    )
    return scores, indices


@triton.jit
def _rank(mine, score, others, against):
    """Of numbers [N] at indices `mine`, how many of `against` [M], at indices `others`, come before each."""
    above = (against[None, :] > score[:, None]) | (
        (against[None, :] == score[:, None]) & (others[None, :] < mine[:, None])
    )
    return tl.sum(above.to(tl.int32), 1)


@triton.jit
def _number(score):
    """The score, with NaN replaced so that it can be compared."""
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _highest(scores, chosen, places, size, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """One row: a number is selected if few enough come before it; its rank is the count of selected ones to its left.

    All pairs are compared: that is faster than sorting a few hundred numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    mine = tl.arange(0, BLOCK)
    inside = mine < size
    score = _number(tl.load(scores + row * size + mine, mask=inside, other=float("-inf")))
    rank = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, BLOCK, STEP):
        others = start + tl.arange(0, STEP)
        against = _number(tl.load(scores + row * size + others, mask=others < size, other=float("-inf")))
        rank += _rank(mine, score, others, against)
    taken = inside & (rank < count)
    place = tl.cumsum(taken.to(tl.int32), 0)
    tl.store(chosen + row * count + place - 1, mine.to(tl.int64), mask=taken)
    numbers = places + row * (size + 1)
    tl.store(numbers + 1 + mine, tl.where(taken, place, 0).to(tl.int64), mask=inside)
    tl.store(numbers + mine, tl.zeros([BLOCK], tl.int64), mask=mine == 0)


def highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the highest of each row [rows, size], ascending; and the ranks of all among them."""
    rows, size = scores.shape
    chosen = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    places = torch.empty(rows, size + 1, dtype=torch.int64, device=scores.device)
    block = triton.next_power_of_2(size)
    _highest[(rows,)](scores, chosen, places, size, count, BLOCK=block, STEP=min(32, block), num_warps=8)
    return chosen, places


@triton.jit
def _joint(above_scores, scores, lane, candidate, inside, least, BRANCH: tl.constexpr, ABOVE: tl.constexpr):
    """Logs of joint probabilities of a lane's candidates."""
    before = tl.load(above_scores + lane * ABOVE + candidate // BRANCH, mask=inside, other=float("-inf"))
    step = tl.load(scores + lane * ABOVE * BRANCH + candidate, mask=inside, other=float("-inf"))
    return before + tl.where(step == step, tl.minimum(tl.maximum(step, least), 0.0), step)


@triton.jit(do_not_specialize=["start", "size", "first"])
def _grow(
    above_places,  # int64 [lanes, ABOVE]
    above_scores,  # float32 [lanes, ABOVE]
    above_bits,  # int32 [lanes, ABOVE, WORDS]
    scores,  # float32 [lanes * ABOVE, BRANCH]
    indices,  # int64 [lanes * ABOVE, BRANCH]
    ids,  # int64 [tokens]
    pool_scores,  # float32 [lanes, size]
    pool_tokens,  # int64 [lanes, size]
    pool_parents,  # int64 [lanes, size]
    places,  # int64 [lanes, WIDTH], as all below: the expanded nodes
    tokens,
    parents,
    joints,  # float32
    bits,  # int32 [lanes, WIDTH, WORDS]
    start,  # of this level's nodes in the pool
    size,
    first,  # the first column of the expanded nodes
    least,
    ABOVE: tl.constexpr,
    BRANCH: tl.constexpr,
    WIDTH: tl.constexpr,  # 0: nothing is expanded
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """One lane."""
    lane = tl.program_id(0).to(tl.int64)
    mine = tl.arange(0, BLOCK)
    inside = mine < ABOVE * BRANCH
    joint = _joint(above_scores, scores, lane, mine, inside, least, BRANCH, ABOVE)
    index = tl.load(indices + lane * ABOVE * BRANCH + mine, mask=inside, other=0)
    token = tl.load(ids + index, mask=inside, other=0)
    parent = mine // BRANCH
    here = lane * size + start + mine
    tl.store(pool_scores + here, joint, mask=inside)
    tl.store(pool_tokens + here, token, mask=inside)
    tl.store(pool_parents + here, tl.load(above_places + lane * ABOVE + parent, mask=inside, other=0), mask=inside)
    if WIDTH > 0:
        score = _number(joint)
        rank = tl.zeros([BLOCK], tl.int32)
        for begin in tl.static_range(0, BLOCK, STEP):
            others = begin + tl.arange(0, STEP)
            real = others < ABOVE * BRANCH
            against = _joint(above_scores, scores, lane, others, real, least, BRANCH, ABOVE)
            rank += _rank(mine, score, others, _number(against))
        taken = inside & (rank < WIDTH)
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        line = lane * WIDTH + place
        tl.store(places + line, (start + mine + 1).to(tl.int64), mask=taken)
        tl.store(tokens + line, token, mask=taken)
        tl.store(parents + line, lane * ABOVE + parent, mask=taken)
        tl.store(joints + line, joint, mask=taken)
        column = first + place
        for word in tl.static_range(WORDS):
            seen = tl.load(above_bits + (lane * ABOVE + parent) * WORDS + word, mask=taken, other=0)
            own = tl.where((column >> 5) == word, 1 << (column & 31), 0)
            tl.store(bits + line * WORDS + word, seen | own, mask=taken)


def grow(
    pool: Pool,
    level: int,
    above: Followed,
    scores: torch.Tensor,
    indices: torch.Tensor,
    ids: torch.Tensor,
    least: float,
) -> tuple[torch.Tensor, ...] | None:
    """`Pool.grow`; returns the fields of a `Followed`. `least`: the smallest score that is distinguished."""
    lanes, width = above.places.shape
    last = level + 1 == len(pool.widths)
    below = 0 if last else pool.widths[level + 1]
    words = above.bits.shape[2]

    def numbers(kind: torch.dtype, *more: int) -> torch.Tensor:
        return torch.empty(lanes, below, *more, dtype=kind, device=scores.device)

    places, tokens, parents = (numbers(torch.int64) for _ in range(3))
    joints, bits = numbers(torch.float32), numbers(torch.int32, words)
    block = triton.next_power_of_2(width * pool.branch)
    _grow[(lanes,)](
        *(above.places, above.scores, above.bits, scores, indices, ids, pool.scores, pool.tokens, pool.parents),
        *(places, tokens, parents, joints, bits, pool.starts[level], len(pool), sum(pool.widths[: level + 1]), least),
        ABOVE=width,
        BRANCH=pool.branch,
        WIDTH=below,
        WORDS=words,
        BLOCK=block,
        STEP=min(32, block),
        num_warps=4,
    )
    return None if last else (places, tokens, parents, joints, bits)


@triton.jit(do_not_specialize=["nodes"])
def _count(
    counts,  # int64 [origins, LEVELS, BINS, 2]
    parents,  # int64 [lanes, nodes]
    origins,  # int64 [lanes, nodes]
    depths,  # int64 [lanes, nodes]
    scores,  # float32 [lanes, nodes]
    path,  # int64 [lanes, LEVELS]
    active,  # int64 [lanes]
    nodes,
    LEVELS: tl.constexpr,
    BINS: tl.constexpr,
    NODES: tl.constexpr,  # rounded up to a power of two
):
    """One lane."""
    lane = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    start = lane * nodes
    parent = tl.load(parents + start + node, mask=inside, other=0)
    accepted = node < 0
    offered = parent == 0
    for level in tl.static_range(LEVELS):
        taken = tl.load(path + lane * LEVELS + level)
        accepted |= (node == taken) & (taken > 0)
        offered |= (parent == taken) & (taken > 0)
    offered &= inside & (node > 0) & (tl.load(active + lane) > 0)
    own = tl.load(scores + start + node, mask=inside, other=0.0)
    above = tl.load(scores + start + parent, mask=inside, other=0.0)
    bin = tl.minimum((tl.exp(own - above) * BINS).to(tl.int64), BINS - 1)
    origin = tl.load(origins + start + node, mask=inside, other=0)
    depth = tl.load(depths + start + node, mask=inside, other=1)
    place = counts + ((origin * LEVELS + tl.maximum(depth - 1, 0)) * BINS + bin) * 2
    one = tl.full([NODES], 1, tl.int64)
    tl.atomic_add(place, one, mask=offered)
    tl.atomic_add(place + 1, one, mask=offered & accepted)


def count(
    counts: torch.Tensor,
    parents: torch.Tensor,
    origins: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    path: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """`forest.count`."""
    lanes, nodes = parents.shape
    _, levels, bins, _ = counts.shape
    _count[(lanes,)](
        *(counts, parents, origins, depths, scores, path, active, nodes),
        LEVELS=levels,
        BINS=bins,
        NODES=triton.next_power_of_2(nodes),
        num_warps=1,
    )
