# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of `device_sampling.py`: noise, sum and maximum in one kernel. Importing this file imports triton.

The arithmetic is that of `noise.py` and `sampling.scale_logits`, bit for bit: 32-bit hashing, logarithms and the sum in
float64, a division that rounds to nearest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.types import GREEDY_TEMPERATURE

_BLOCK = 2048  # tokens of one program
GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(ids, low, high):
    """The noise of token ids under one key, given as two 32-bit halves."""
    bits = _mix(_mix(ids.to(tl.uint32) ^ low) + high)
    unit = (bits.to(tl.float64) + 0.5) / 4294967296.0
    return -tl.log(-tl.log(unit))


@triton.jit(do_not_specialize=["rows", "blocks"])
def _draw(logits, keys, temperatures, tops, tokens, rows, vocab, stride, blocks, BLOCK: tl.constexpr):
    """The best of one block of tokens of one row: tops float64 and tokens int64, [rows, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    perturbed = scores.to(tl.float64)
    temperature = tl.load(temperatures + row)
    if temperature >= GREEDY:
        low = tl.load(keys + row).to(tl.uint32)
        high = tl.load(keys + rows + row).to(tl.uint32)
        scaled = tl.div_rn(scores, tl.full([BLOCK], 1.0, tl.float32) * temperature)
        perturbed = scaled.to(tl.float64) + gumbel(ids, low, high)
    top, index = tl.max(perturbed, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tops + row * blocks + block, top)
    tl.store(tokens + row * blocks + block, (block * BLOCK + index).to(tl.int64))


@triton.jit(do_not_specialize=["blocks"])
def _first(tops, tokens, chosen, blocks, BLOCK: tl.constexpr):
    """One row: the best of its blocks' best. Of equals, the first, which has the smaller token id."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    best = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, place = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(chosen + row, tl.load(tokens + row * blocks + place))


def draw(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The choice after each row, int64 [rows]. logits [rows, vocab]; keys int64 [2, rows], of this position."""
    rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    tops = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    _draw[rows, blocks](
        *(logits, keys, temperatures, tops, tokens, rows, vocab, logits.stride(0), blocks), BLOCK=_BLOCK, num_warps=8
    )
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _first[(rows,)](tops, tokens, chosen, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1)
    return chosen
