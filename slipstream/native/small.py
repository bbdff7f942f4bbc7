"""Small operations on rows, each in one call instead of several of a library's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slipstream.native import kernels
from slipstream.native.call import Call
from slipstream.native.kernel_args import Norm, Top


class RMSNorms:
    """RMS norms of several kinds of rows, side by side, each with a weight of its own."""

    def __init__(self, weights: Sequence[torch.Tensor], eps: float) -> None:
        self._weights = [(weight * len(weight) ** 0.5).contiguous() for weight in weights]
        self._width = sum(len(weight) for weight in weights)
        self._floors = [torch.tensor([eps * len(weight)]) for weight in weights]
        steps, start = [], 0
        for weight, floor in zip(self._weights, self._floors, strict=True):
            facts = start, self._width, len(weight), floor.data_ptr(), weight.data_ptr()
            steps.append((kernels.products()["norm"], np.array([0, 0, 0, *facts], np.int64)))
            start += weight.nbytes
        self._call = Call(*steps)

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        """Rows [rows, width] of each kind -> [rows, all widths]."""
        out = parts[0].new_empty(len(parts[0]), self._width)
        words, address = self._call.of(len(out)), out.data_ptr()
        for place, part in zip(self._call.arguments, parts, strict=True):
            words[place + Norm.X], words[place + Norm.X_STRIDE] = part.data_ptr(), part.stride(0)
            words[place + Norm.OUT] += address
        kernels.products().run(words.ctypes.data)
        return out


def top_probabilities(logits: torch.Tensor, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Of float32 logits [rows, width], whole vectors wide: ids and probabilities, [rows, count] each, best first."""
    rows, width = logits.shape
    values, ids = np.empty((rows, count), np.float32), np.empty((rows, count), np.int32)
    call = _top()
    words, (place,) = call.of(rows), call.arguments
    words[place + Top.X :] = (
        *(logits.data_ptr(), logits.stride(0), width, count, values.ctypes.data, ids.ctypes.data),
        rows,
    )
    kernels.products().run(words.ctypes.data)
    return ids, values


@functools.cache
def _top() -> Call:
    return Call((kernels.products()["top"], np.zeros(Top.WORDS, np.int64)))
