"""Small operations on rows, each in one call instead of several of a library's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slipstream.native import kernels
from slipstream.native.call import Call, address_of
from slipstream.native.kernel_args import Draw, Norm, Perturb, Top


class RMSNorms:
    """RMS norms of several kinds of rows, side by side, each with a weight of its own."""

    def __init__(self, weights: Sequence[torch.Tensor], eps: float) -> None:
        self._weights = [(weight * len(weight) ** 0.5).contiguous() for weight in weights]
        self._width = sum(len(weight) for weight in weights)
        self._floors = [torch.tensor([eps * len(weight)]) for weight in weights]
        steps, start = [], 0
        for weight, floor in zip(self._weights, self._floors, strict=True):
            facts = start, self._width, len(weight), floor.data_ptr(), weight.data_ptr()
            steps.append((kernels.float32()["norm"], np.array([0, 0, 0, *facts], np.int64)))
            start += weight.nbytes
        self._call = Call(*steps)

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        """Rows [rows, width] of each kind -> [rows, all widths]."""
        out = parts[0].new_empty(len(parts[0]), self._width)
        args, address = self._call.of(len(out)), out.data_ptr()
        for place, part in zip(self._call.arguments, parts, strict=True):
            args[place + Norm.X], args[place + Norm.X_STRIDE] = part.data_ptr(), part.stride(0)
            args[place + Norm.OUT] += address
        kernels.float32().run(address_of(args))
        return out


def top_probabilities(logits: torch.Tensor, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Of float32 logits [rows, width], whole vectors wide: ids and probabilities, [rows, count] each, best first."""
    rows, width = logits.shape
    values, ids = np.empty((rows, count), np.float32), np.empty((rows, count), np.int32)
    call = _top()
    args, (place,) = call.of(rows), call.arguments
    args[place + Top.X :] = (
        *(logits.data_ptr(), logits.stride(0), width, count, address_of(values), address_of(ids)),
        rows,
    )
    kernels.float32().run(address_of(args))
    return ids, values


@functools.cache
def _top() -> Call:
    return Call((kernels.float32()["top"], np.zeros(Top.LENGTH, np.int64)))


def drawn(logits: torch.Tensor, temperature: float, key: int, ids: torch.Tensor | None = None) -> int | None:
    """The index of the largest of float32 logits [tokens] / temperature plus the Gumbel noise of a key.

    `ids`: int64 [tokens], unless the tokens are the whole vocabulary. None if the two best are too near each other, or
    a score is not finite: then the library's logarithm decides.
    """
    call = _draw(ids is not None)
    args, (place,) = call.of(1), call.arguments
    address = 0 if ids is None else ids.data_ptr()
    args[place + Draw.X : place + Draw.RESULT] = (
        *(logits.data_ptr(), len(logits), address),
        *(_bits(temperature), _signed(key)),
    )
    kernels.noise().run(address_of(args), alone=True)
    index = int(args[place + Draw.RESULT])
    return index if index >= 0 else None


@functools.cache
def _draw(listed: bool) -> Call:
    return Call((kernels.noise()["draw_listed" if listed else "draw"], np.zeros(Draw.LENGTH, np.int64)))


def perturbed(
    logits: torch.Tensor, temperature: float, keys: Sequence[int], ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Float32 logits [rows, width], whole vectors wide, / temperature plus the Gumbel noise of each row's key.

    `ids`: int64 [width], unless the columns are the whole vocabulary.
    """
    rows, width = logits.shape
    scores, row_keys = torch.empty(rows, width), np.array([_signed(key) for key in keys], np.int64)
    call = _perturb(ids is not None)
    args, (place,) = call.of(rows), call.arguments
    args[place + Perturb.X : place + Perturb.LENGTH] = (
        *(logits.data_ptr(), logits.stride(0), width, 0 if ids is None else ids.data_ptr()),
        *(_bits(temperature), address_of(row_keys), scores.data_ptr()),
    )
    kernels.noise().run(address_of(args))
    return scores


@functools.cache
def _perturb(listed: bool) -> Call:
    return Call((kernels.noise()["perturb_listed" if listed else "perturb"], np.zeros(Perturb.LENGTH, np.int64)))


@functools.lru_cache(maxsize=64)
def _bits(number: float) -> int:
    """The bits of a float32."""
    return int(np.float32(number).view(np.uint32))


def _signed(key: int) -> int:
    """64 bits as numpy's int64 has them."""
    return key - (1 << 64) if key >> 63 else key
