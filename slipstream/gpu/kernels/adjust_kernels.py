# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `adjustments.py`. Importing this file imports triton: done lazily, and only on a GPU.

The arithmetic is that of `Sampler.adjusted`, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from slipstream.gpu.adjustments import Adjustments
    from slipstream.gpu.lanes import Lanes

_BLOCK = 2048  # tokens of one program
# As in `adjustments.py`.
_BIASED, _REPEATED, _COUNTED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_COUNT = tl.constexpr((1 << 30) - 1)  # the bits of a count that are not about the prompt
_ANY = tl.constexpr(-1)


@triton.jit(do_not_specialize=["each", "lanes"])
def _adjust(
    logits,
    scores,  # float32 [rows, vocab]
    flags,  # int32 [lanes]
    penalties,  # float32 [3, lanes]
    bias,  # float32 [lanes, vocab]
    counts,  # int32 [lanes, vocab]
    tokens,  # int64 [lanes, each]
    parents,  # int64 [lanes, each]
    lanes,
    each,
    vocab,
    stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adjust one block of tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = row // each
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    values = tl.load(logits + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(flags + lane)
    if (wanted & _BIASED) > 0:
        values += tl.load(bias + lane * vocab + ids, mask=inside, other=0.0)
    if (wanted & (_REPEATED | _COUNTED)) > 0:
        seen = tl.load(counts + lane * vocab + ids, mask=inside, other=0)
        node = row % each
        for _ in tl.static_range(DEPTH):
            token = tl.load(tokens + lane * each + node)
            seen += ((ids == token) & (node > 0)).to(tl.int32)
            node = tl.load(parents + lane * each + node)
        if (wanted & _REPEATED) > 0:
            penalty = tl.load(penalties + lane)
            eased = tl.where(
                values > 0, tl.div_rn(values, tl.full([BLOCK], 1.0, tl.float32) * penalty), values * penalty
            )
            values = tl.where(seen > 0, eased, values)
        if (wanted & _COUNTED) > 0:
            said = seen & _COUNT
            presence, frequency = tl.load(penalties + lanes + lane), tl.load(penalties + 2 * lanes + lane)
            # The product is rounded before the sum: in float64 it is exact, and no compiler can fuse the two.
            product = (said.to(tl.float64) * frequency.to(tl.float64)).to(tl.float32)
            values = tl.where(said > 0, values - (product + presence), values)
    tl.store(scores + row * vocab + ids, values, mask=inside)


@triton.jit(do_not_specialize=["each"])
def _forbid(
    scores,  # float32 [rows, vocab]
    tail,  # int64 [lanes, BEFORE]
    last,  # int64 [lanes, ENTRIES]
    before,  # int64 [lanes, ENTRIES, BEFORE]
    until,  # int64 [lanes, ENTRIES]
    tokens,  # int64 [lanes, each]
    parents,  # int64 [lanes, each]
    after,  # int64 [rows]
    each,
    vocab,
    BEFORE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Forbid the listed tokens in one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = row // each
    entry = lane * ENTRIES + tl.arange(0, ENTRIES)
    forbidden = tl.load(after + row) < tl.load(until + entry)
    node = row % each
    place = tl.full([], BEFORE - 1, tl.int64)  # in the answer's last tokens
    for back in tl.static_range(BEFORE):
        in_tree = node > 0
        token = tl.load(tokens + lane * each + node)
        token = tl.where(in_tree, token, tl.load(tail + lane * BEFORE + place))
        place -= tl.where(in_tree, 0, 1)
        node = tl.load(parents + lane * each + node)
        wanted = tl.load(before + entry * BEFORE + (BEFORE - 1 - back))
        forbidden = forbidden & ((wanted == token) | (wanted == _ANY))
    values = tl.full([ENTRIES], float("-inf"), tl.float32)
    tl.store(scores + row * vocab + tl.load(last + entry), values, mask=forbidden)


def adjust(tables: Adjustments, lanes: Lanes, logits: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`Adjustments.adjusted`."""
    rows, vocab = logits.shape
    each = rows // lanes.size
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _adjust[rows, triton.cdiv(vocab, _BLOCK)](
        *(logits, scores, tables.flags, tables.penalties, tables.bias, tables.counts, lanes.tokens, lanes.parents),
        *(lanes.size, each, vocab, logits.stride(0)),
        DEPTH=lanes.depth,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    lists = tables.tail, tables.tokens, tables.before, tables.until
    _forbid[(rows,)](
        *(scores, *lists, lanes.tokens, lanes.parents, after, each, vocab),
        BEFORE=tables.tail.shape[1],
        ENTRIES=tables.tokens.shape[1],
        num_warps=1,
    )
    return scores
