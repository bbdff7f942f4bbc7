# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernel of `repeats.py`. Importing this file imports triton: only `repeats.py` does, and only on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # positions compared at a time


@triton.jit
def _follow(
    history,  # int32 [lanes, room]
    taken,  # int64 [lanes, fresh]
    accepted,  # int64 [lanes]
    slots,  # int64 [lanes]
    table,  # float32 [1 + LONGEST, LENGTH]
    tokens,  # int64 [lanes, LENGTH]
    scores,  # float32 [lanes, LENGTH]
    room,
    fresh,
    LONGEST: tl.constexpr,
    LENGTH: tl.constexpr,
    FRESH: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append the newest tokens of one lane, and find its chain."""
    lane = tl.program_id(0).to(tl.int64)
    line = history + lane * room
    root = tl.load(slots + lane)
    new = tl.arange(0, FRESH)
    came = tl.load(taken + lane * fresh + new, mask=new < fresh, other=0)
    tl.store(line + root - tl.load(accepted + lane) + new, came.to(tl.int32), mask=new < fresh)
    tl.debug_barrier()  # other threads of this program read it
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, root, BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = place < root
        matched = tl.zeros([BLOCK], tl.int32)
        for back in range(LONGEST):
            wanted = tl.load(line + tl.maximum(root - back, 0))
            before = tl.load(line + place - back, mask=same & (place >= back), other=-1)
            same = same & (before == wanted)
            matched += same.to(tl.int32)
        best = tl.maximum(best, tl.where(matched > 0, matched.to(tl.int64) * room + place, 0))
    top = tl.max(best, 0)
    found = top % room
    step = tl.arange(0, CHAIN)
    chain = found + 1 + step % tl.maximum(root - found, 1)
    inside = step < LENGTH
    tl.store(tokens + lane * LENGTH + step, tl.load(line + chain, mask=inside, other=0).to(tl.int64), mask=inside)
    score = tl.load(table + top // room * LENGTH + step, mask=inside, other=0.0)
    tl.store(scores + lane * LENGTH + step, score, mask=inside)


def follow(
    history: torch.Tensor, taken: torch.Tensor, accepted: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`repeats.follow`."""
    lanes, room = history.shape
    fresh, length = taken.shape[1], scores.shape[1]
    chains = torch.empty(lanes, length, dtype=torch.int64, device=history.device)
    joint = torch.empty(lanes, length, dtype=torch.float32, device=history.device)
    _follow[(lanes,)](
        *(history, taken, accepted, slots, scores, chains, joint, room, fresh),
        LONGEST=len(scores) - 1,
        LENGTH=length,
        FRESH=triton.next_power_of_2(fresh),
        CHAIN=triton.next_power_of_2(length),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return chains, joint
