"""A kernel that shows both kinds of noise of `sampling_kernels.py`. Importing this file imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.gpu.kernels.sampling_kernels import gumbel, near_gumbel


@triton.jit
def _both(keys, near, exact, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)
    tl.store(near + ids, near_gumbel(ids, low, high))
    tl.store(exact + ids, gumbel(ids, low, high))


def both(keys: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The noise of `size` tokens (a multiple of 4096) under one key [2]: in float32 and in float64."""
    near = torch.empty(size, dtype=torch.float32, device=keys.device)
    exact = torch.empty(size, dtype=torch.float64, device=keys.device)
    _both[(size // 4096,)](keys, near, exact, BLOCK=4096)
    return near, exact
