# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of min-p, top-k and top-p. Importing this file imports triton.

Nothing is sorted. Tokens have an order (by logit, then by id), and each cut keeps a prefix of that order. The kernel
starts from the choice among all tokens. If the cuts keep that token, it is the choice. If not, the kernel takes the
choice among the tokens before it, and so on: with top-p 0.9, nine of ten rows keep the first one. Whether the cuts keep
a token depends on the number and the weight of the tokens before it: sums of integers, exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.gpu.kernels.sampling_kernels import BLOCK as DRAWN
from slipstream.gpu.kernels.sampling_kernels import GREEDY, decided, draw, near_gumbel, ordered, scaled_logits
from slipstream.sampling import WEIGHT_BITS

_BLOCK = 4096  # tokens that one program reads at a time
_ONE = tl.constexpr(2.0**WEIGHT_BITS)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def weights(scores, best):
    """`sampling.token_weights`."""
    return (tl.exp(scores.to(tl.float64) - best.to(tl.float64)) * _ONE).to(tl.int64)


@triton.jit
def _kth(line, vocab, divisor, count, BLOCK: tl.constexpr):
    """The `count`-th largest scaled logit, and how many equal to it are among the `count` largest.

    Its bits are found eight at a time, by counting.
    """
    prefix = tl.full([], 0, tl.int64)
    left = count
    bins = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            level = (ordered(scaled_logits(line, ids, vocab, divisor), ids) >> 32) + 2147483648  # 32 bits, unsigned
            inside = (ids < vocab) & ((level >> (shift + 8)) == prefix)
            counts += tl.histogram(((level >> shift) & 255).to(tl.int32), 256, mask=inside)
        reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # how many have this digit or a larger one
        digit = tl.sum((reaching >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        prefix = prefix * 256 + digit
    bits = (prefix - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True), left


@triton.jit(do_not_specialize=["rows", "blocks"])
def _cut(
    logits,
    keys,  # int64 [2, rows]
    temperatures,  # float32 [rows]
    min_ps,  # float32 [rows]: logarithms
    top_ks,  # int64 [rows]
    top_ps,  # float64 [rows]
    peaks,  # float32 [rows, blocks]
    chosen,  # int64 [rows]: the choices among all tokens, replaced
    rows,
    vocab,
    stride,
    blocks,
    PEAKS: tl.constexpr,  # `blocks` rounded up to a power of two
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # parts of BLOCK tokens, rounded up to a power of two
):
    """Choose the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if (temperature >= GREEDY) & ((top_k < vocab) | (top_p < 1.0) | (min_p > _NONE)):
        line = logits + row * stride
        low = tl.load(keys + row).to(tl.uint32)
        high = tl.load(keys + rows + row).to(tl.uint32)
        place = tl.arange(0, PEAKS)
        best = tl.max(tl.load(peaks + row * blocks + place, mask=place < blocks, other=_NONE), 0)
        floor = best + min_p  # the smallest scaled logit that may be left
        least, left = floor, tl.full([], 0, tl.int32)
        if top_k < vocab:
            least, left = _kth(line, vocab, temperature, top_k.to(tl.int32), BLOCK)
            floor = tl.maximum(floor, least)
        needed = tl.full([], 0, tl.int64)
        if top_p < 1.0:
            total = tl.full([], 0, tl.int64)
            equal = tl.full([], 0, tl.int32)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                scaled = scaled_logits(line, ids, vocab, temperature)
                total += tl.sum(tl.where(scaled >= floor, weights(scaled, best), 0), 0)
                equal += tl.sum(((scaled == least) & (ids < vocab)).to(tl.int32), 0)
            if (top_k < vocab) & (least >= floor):  # of equal ones only the first are left
                total -= (equal - left).to(tl.int64) * weights(least, best)
            needed = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        token = tl.load(chosen + row).to(tl.int32)
        parts = tl.arange(0, BLOCKS)
        searching = tl.full([], 1, tl.int32)
        while searching > 0:
            value = tl.div_rn(tl.load(line + token).to(tl.float32), temperature)
            own = ordered(value, token)
            rank = tl.full([], 0, tl.int64)
            weight = tl.full([], 0, tl.int64)
            if top_p < 1.0:
                for start in range(0, vocab, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    scaled = scaled_logits(line, ids, vocab, temperature)
                    before = (ordered(scaled, ids) > own) & (ids < vocab)
                    rank += tl.sum(before.to(tl.int32), 0)
                    weight += tl.sum(tl.where(before, weights(scaled, best), 0), 0)
            else:
                for start in range(0, vocab, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    before = (ordered(scaled_logits(line, ids, vocab, temperature), ids) > own) & (ids < vocab)
                    rank += tl.sum(before.to(tl.int32), 0)
            searching = 1 - ((value >= floor) & (rank < top_k) & ((top_p >= 1.0) | (weight < needed))).to(tl.int32)
            if searching > 0:
                tops = tl.full([BLOCKS], _NONE, tl.float32)
                for part in range(tl.cdiv(vocab, BLOCK)):
                    ids = part * BLOCK + tl.arange(0, BLOCK)
                    scaled = scaled_logits(line, ids, vocab, temperature)
                    within = (ordered(scaled, ids) > own) & (scaled >= floor)
                    near = tl.where(within, scaled + near_gumbel(ids, low, high), _NONE)
                    tops = tl.where(parts == part, tl.max(near, 0), tops)
                next_one = decided(tops, line, temperature, low, high, vocab, own, floor, True, BLOCK)
                searching = (next_one >= 0).to(tl.int32)  # no token: the row has numbers that are not finite
                token = tl.maximum(next_one, 0)
        tl.store(chosen + row, token.to(tl.int64))


def draw_cut(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
) -> torch.Tensor:
    """The choice after each row among the tokens that the cuts leave, int64 [rows]: see `device_sampling.RowCuts`."""
    rows, vocab = logits.shape
    blocks = -(-vocab // DRAWN)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    chosen = draw(logits, keys, temperatures, peaks)
    _cut[(rows,)](
        *(logits, keys, temperatures, min_ps, top_ks, top_ps, peaks, chosen, rows, vocab, logits.stride(0), blocks),
        PEAKS=triton.next_power_of_2(blocks),
        BLOCK=_BLOCK,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)),
        num_warps=16,
    )
    return chosen
