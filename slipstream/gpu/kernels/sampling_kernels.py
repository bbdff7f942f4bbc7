# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `device_sampling.py`: noise, sum and maximum. Importing this file imports triton.

The arithmetic is that of `noise.py` and `sampling.scale_logits`, bit for bit: 32-bit hashing, logarithms and the sum in
float64, a division that rounds to nearest. But two logarithms in float64 for every token would cost more than all else
of a sampled step, so they are taken only where they can decide: the noise of every token is first computed in float32,
with a known error, and the few tokens whose sums are within that error of the best are compared exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream import noise
from slipstream.types import GREEDY_TEMPERATURE

BLOCK = 2048  # tokens of one program
_KEYS = 128  # keys of one program
GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
GOLDEN, PURPOSE = tl.constexpr(noise.GOLDEN), tl.constexpr(noise.MATCH)
# Bound of the error of a difference of two sums: that of the noise in float32 (some 2e-5), and of rounding a sum.
_NOISE_ERROR, _SUM_ERROR = tl.constexpr(1e-4), tl.constexpr(1e-6)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hashed(ids, low, high):
    return _mix(_mix(ids.to(tl.uint32) ^ low) + high)


@triton.jit
def _folded(low, high, word):
    """A key with one 32-bit word more folded in."""
    low = _mix((low ^ word) + GOLDEN)
    return low, _mix(high + word + low)


@triton.jit
def gumbel(ids, low, high):
    """The noise of token ids under one key, given as two 32-bit halves."""
    unit = (_hashed(ids, low, high).to(tl.float64) + 0.5) / 4294967296.0
    return -tl.log(-tl.log(unit))


@triton.jit
def near_gumbel(ids, low, high):
    """`gumbel` in float32, within 2e-5. Close to 1, the inner logarithm is that of what is missing: a series."""
    bits = _hashed(ids, low, high)
    unit = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * (0.25 + rest * 0.2))))
    return -tl.log(tl.where(rest < 0.0625, series, -tl.log(unit)))


@triton.jit
def scaled_logits(line, ids, vocab, divisor):
    """Logits of one row divided by its temperature, float32; -inf after the end of the vocabulary."""
    scores = tl.load(line + ids, mask=ids < vocab, other=_NONE).to(tl.float32)
    return tl.div_rn(scores, tl.full(scores.shape, 1.0, tl.float32) * divisor)


@triton.jit
def ordered(scores, ids):
    """int64 keys in the order of tokens: the larger score first, of equals the smaller id. No two are equal."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def decided(tops, line, divisor, low, high, vocab, after, floor, RESTRICTED: tl.constexpr, BLOCK: tl.constexpr):
    """The token whose scaled logit plus noise is the largest; of equals the smallest id. -1 if there is none.

    `tops`: the largest sum in float32 of each block of tokens. If RESTRICTED, only tokens count whose keys are above
    `after` and whose scaled logits are at least `floor`.
    """
    places = tl.arange(0, tops.shape[0])
    offsets = tl.arange(0, BLOCK)
    best = tl.full([], _NONE, tl.float64)
    token = tl.full([], -1, tl.int32)
    top, block = tl.max(tops, 0, return_indices=True, return_indices_tie_break_left=True)
    limit = top - (_NOISE_ERROR + _SUM_ERROR * tl.abs(top))
    while (top >= limit) & (top > _NONE):
        ids = block * BLOCK + offsets
        scaled = scaled_logits(line, ids, vocab, divisor)
        near = scaled + near_gumbel(ids, low, high)
        if RESTRICTED:
            near = tl.where((ordered(scaled, ids) > after) & (scaled >= floor), near, _NONE)
        close, place = tl.max(near, 0, return_indices=True, return_indices_tie_break_left=True)
        while (close >= limit) & (close > _NONE):
            id = block * BLOCK + place
            value = tl.sum(tl.where(offsets == place, scaled, 0.0), 0).to(tl.float64) + gumbel(id, low, high)
            better = (value > best) | ((value == best) & (id < token))
            best = tl.where(better, value, best)
            token = tl.where(better, id, token)
            near = tl.where(offsets == place, _NONE, near)
            close, place = tl.max(near, 0, return_indices=True, return_indices_tie_break_left=True)
        tops = tl.where(places == block, _NONE, tops)
        top, block = tl.max(tops, 0, return_indices=True, return_indices_tie_break_left=True)
    return token


@triton.jit(do_not_specialize=["count"])
def _match_keys(stems, positions, keys, count, BLOCK: tl.constexpr):
    """Some of the keys; an integer is folded in as its two halves."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    low = tl.load(stems + number, mask=inside, other=0).to(tl.uint32)
    high = tl.load(stems + count + number, mask=inside, other=0).to(tl.uint32)
    position = tl.load(positions + number, mask=inside, other=0)
    low, high = _folded(low, high, position.to(tl.uint32))
    low, high = _folded(low, high, (position >> 32).to(tl.uint32))
    low, high = _folded(low, high, tl.full(low.shape, PURPOSE, tl.uint32))
    low, high = _folded(low, high, tl.zeros_like(low))
    tl.store(keys + number, low.to(tl.int64), mask=inside)
    tl.store(keys + count + number, high.to(tl.int64), mask=inside)


def match_keys(stems: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`device_sampling.match_keys` in one kernel."""
    stems, count = stems.contiguous(), len(positions)
    keys = torch.empty_like(stems)
    _match_keys[(triton.cdiv(count, _KEYS),)](stems, positions.contiguous(), keys, count, BLOCK=_KEYS, num_warps=1)
    return keys


@triton.jit(do_not_specialize=["rows", "blocks"])
def _tops(
    logits, keys, temperatures, tops, peaks, rows, vocab, stride, blocks, PEAKS: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of tokens of one row: the largest sum with noise in float32, and if PEAKS the largest scaled logit."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    scaled = scaled_logits(logits + row * stride, ids, vocab, tl.where(temperature >= GREEDY, temperature, 1.0))
    if PEAKS:
        tl.store(peaks + row * blocks + block, tl.max(scaled, 0))
    if temperature >= GREEDY:
        low = tl.load(keys + row).to(tl.uint32)
        high = tl.load(keys + rows + row).to(tl.uint32)
        scaled += near_gumbel(ids, low, high)
    tl.store(tops + row * blocks + block, tl.max(scaled, 0))


@triton.jit(do_not_specialize=["rows", "blocks"])
def _decide(
    logits, keys, temperatures, tops, chosen, rows, vocab, stride, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """One row: the best token of its best blocks."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    block = tl.arange(0, BLOCKS)
    best = tl.load(tops + row * blocks + block, mask=block < blocks, other=_NONE)
    temperature = tl.load(temperatures + row)
    token = tl.full([], 0, tl.int32)
    if temperature >= GREEDY:
        low = tl.load(keys + row).to(tl.uint32)
        high = tl.load(keys + rows + row).to(tl.uint32)
        token = decided(best, line, temperature, low, high, vocab, 0, 0.0, False, BLOCK)
    else:
        _, first = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
        ids = first * BLOCK + tl.arange(0, BLOCK)
        scores = tl.load(line + ids, mask=ids < vocab, other=_NONE).to(tl.float32)
        _, place = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = first * BLOCK + place
    # A row without a finite number has no choice; any token is as good.
    tl.store(chosen + row, tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64))


def draw(
    logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, peaks: torch.Tensor | None = None
) -> torch.Tensor:
    """The choice after each row, int64 [rows]. logits [rows, vocab]; keys int64 [2, rows], of this position.

    `peaks` float32 [rows, blocks] gets the largest scaled logit of each block.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    tops = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sizes = (rows, vocab, logits.stride(0), blocks)
    _tops[rows, blocks](
        *(logits, keys, temperatures, tops, tops if peaks is None else peaks, *sizes),
        PEAKS=peaks is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _decide[(rows,)](
        *(logits, keys, temperatures, tops, chosen, *sizes),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=4,
    )
    return chosen
