"""Elementwise functions over whole vectors, so that an element's bits do not depend on its position.

Vector code and the scalar code for a remainder may round differently (silu and gelu do), and every thread has a
remainder of its own. So functions run over whole vectors only, on every thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Elementwise = Callable[[torch.Tensor], torch.Tensor]

LANES = 32  # elements of one unrolled vector iteration of an elementwise kernel
_GRAIN = 16_384  # elements up to which every kernel uses one thread (gelu; most do up to 32,768)


def evenly(function: Elementwise, rows: torch.Tensor) -> torch.Tensor:
    """`function` of [rows, width], the width being whole vectors; in parts where threads would split a vector."""
    if _splits_evenly(rows):
        return function(rows)
    width = rows.shape[1]
    if width > _GRAIN:
        return torch.cat([evenly(function, part) for part in rows.split(_GRAIN, dim=1)], dim=1)
    return torch.cat([function(part) for part in rows.split(_GRAIN // width)])


def evenly_(function_: Elementwise, x: torch.Tensor) -> torch.Tensor:
    """`evenly` in place, for a contiguous tensor whose last dimension is whole vectors."""
    if _splits_evenly(x):
        return function_(x)
    for piece in x.view(-1).split(_GRAIN):
        function_(piece)
    return x


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of [rows, width], of any width; overwrites x."""
    width = x.shape[1]
    fill = -width % LANES
    whole = functional.pad(x, (0, fill)) if fill else x
    return evenly_(torch.tanh_, whole.div_(cap)).mul_(cap)[:, :width]


def _splits_evenly(x: torch.Tensor) -> bool:
    count = x.numel()
    return count <= _GRAIN or count % (LANES * torch.get_num_threads()) == 0 or not x.is_cpu
