"""Gumbel-max by our own CPU kernels: the largest of logits plus noise, and the largest few.

`noise.py` and `sampling.py` define what is chosen; a kernel gives the same choice faster, or says that it cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slipstream import noise
from slipstream.native import small
from slipstream.native.machine import machine

Likeliest = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]  # columns and probabilities [rows, count], best first


def drawn(logits: torch.Tensor, temperature: float, key: int, ids: torch.Tensor | None = None) -> int | None:
    """The index of the largest of logits [tokens] / temperature plus the noise of a key; of equals, the first.

    `ids`: the tokens' own, int64, unless they are the whole vocabulary. None: there is no kernel here, or it cannot
    tell which of two is larger.
    """
    if logits.device.type != "cpu" or not kernels_work():
        return None
    return small.drawn(logits.float().contiguous(), temperature, key, ids)


def likeliest(logits: torch.Tensor, count: int) -> Likeliest | None:
    """The `count` likeliest columns of each row of logits [rows, width]; None: there is no kernel for them."""
    return small.top_probabilities(logits, count) if _whole_vectors(logits) else None


def perturbed(
    logits: torch.Tensor, temperature: float, keys: Sequence[int], ids: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Rows of logits / temperature plus the noise of each row's key, float32: enough for drafts. None: no kernel.

    `ids`: the columns' tokens, int64, unless they are the whole vocabulary.
    """
    return small.perturbed(logits, temperature, keys, ids) if _whole_vectors(logits) else None


def _whole_vectors(logits: torch.Tensor) -> bool:
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1 or not kernels_work():
        return False
    here = machine()
    return here is not None and logits.shape[1] % here.lanes == 0


@functools.cache
def kernels_work() -> bool:
    """Whether the kernels are available here, and choose the same tokens as the definition."""
    if machine() is None:
        return False
    own = torch.Generator().manual_seed(0)  # the user's random state stays as it is
    logits, ids = torch.randn(1000, generator=own), torch.randperm(5000, generator=own)[:1000].sort().values
    try:
        for key in (noise.key(number) for number in range(8)):
            for tokens, listed in ((noise.gumbel(key, 1000), None), (noise.gumbel(key, ids), ids)):
                if small.drawn(logits, 0.5, key, listed) != int((logits / 0.5 + tokens).argmax()):
                    return False
    except RuntimeError:  # a compiler that cannot build our IR
        return False
    return True
