# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of `lane_scores.py`. Importing this file imports triton: done lazily, and only on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.gpu.kernels.cut_kernels import weights
from slipstream.gpu.kernels.sampling_kernels import ordered
from slipstream.sampling import WEIGHT_BITS

_BLOCK = 4096  # tokens that are read at a time
_UNIT = tl.constexpr(2.0**-WEIGHT_BITS)
_NONE = tl.constexpr(float("-inf"))
_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _keys(line, ids, vocab):
    scores = tl.load(line + ids, mask=ids < vocab, other=_NONE).to(tl.float32)
    return scores, tl.where(ids < vocab, ordered(scores, ids), _LEAST)


@triton.jit
def _value(key):
    """The score of a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _score(
    logits,
    rows,  # int64 [n]
    tokens,  # int64 [n]
    wanted,  # int64 [n]
    values,  # float32 [n, WIDTH]
    ids_out,  # int64 [n, WIDTH]
    vocab,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of a row, rounded up to a power of two
):
    """Score one row: take the largest of the blocks' largest keys, then read its block again for the next one."""
    which = tl.program_id(0).to(tl.int64)
    count = tl.load(wanted + which)
    if count >= 0:
        line = logits + tl.load(rows + which) * stride
        places = tl.arange(0, BLOCKS)
        tops = tl.full([BLOCKS], _LEAST, tl.int64)
        for block in range(tl.cdiv(vocab, BLOCK)):
            _, keys = _keys(line, block * BLOCK + tl.arange(0, BLOCK), vocab)
            tops = tl.where(places == block, tl.max(keys, 0), tops)
        best = _value(tl.max(tops, 0))
        token = tl.load(tokens + which).to(tl.int32)
        own = tl.load(line + token).to(tl.float32)
        key = ordered(own, token)
        rank = tl.full([], 1, tl.int64)
        total = tl.full([], 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            scores, keys = _keys(line, start + tl.arange(0, BLOCK), vocab)
            rank += tl.sum((keys > key).to(tl.int32), 0)
            total += tl.sum(weights(scores, best), 0)
        whole = best.to(tl.float64) + tl.log(total.to(tl.float64) * _UNIT)
        tl.store(values + which * WIDTH, (own.to(tl.float64) - whole).to(tl.float32))
        tl.store(ids_out + which * WIDTH, rank)
        for place in range(1, tl.minimum(count, WIDTH - 1) + 1):
            top = tl.max(tops, 0)
            id = 0x7FFFFFFF - (top & 0xFFFFFFFF)
            tl.store(values + which * WIDTH + place, (_value(top).to(tl.float64) - whole).to(tl.float32))
            tl.store(ids_out + which * WIDTH + place, id)
            block = (id // BLOCK).to(tl.int32)
            _, keys = _keys(line, block * BLOCK + tl.arange(0, BLOCK), vocab)
            tops = tl.where(places == block, tl.max(tl.where(keys < top, keys, _LEAST), 0), tops)


def score_rows(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor, tops: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lane_scores.score_rows`."""
    vocab = logits.shape[1]
    values = torch.empty(len(rows), 1 + tops, dtype=torch.float32, device=logits.device)
    ids = torch.empty(len(rows), 1 + tops, dtype=torch.int64, device=logits.device)
    _score[(len(rows),)](
        *(logits, rows, tokens, wanted, values, ids, vocab, logits.stride(0)),
        WIDTH=1 + tops,
        BLOCK=_BLOCK,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)),
        num_warps=16,
    )
    return values, ids
