"""What this processor can do, and whether kernels can be compiled for it at all."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch  # loads the OpenMP library whose threads the kernels use

from slipstream.native.matrix_unit import matrix_unit_works

TEAM = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True)
class Machine:
    """Vectors of so many floats, and tiles of so many rows. `digits`: there are kernels for 8-bit products; `dots`: and
    an instruction for just that, in vectors of 64 bytes. `piece`: inputs that several tiles take one after the other
    while their weights are in the first cache. `abreast`: vectors of sums that a float32 product of few rows keeps to
    read several panels side by side; 0 where it is not known that this is faster.
    """

    lanes: int
    tile_rows: int
    digits: bool
    dots: bool
    piece: int = 64
    abreast: int = 0


@functools.cache
def machine() -> Machine | None:
    """This machine; None where there is no compiler, no OpenMP or no vector unit that the kernels are written for."""
    try:
        from llvmlite import binding
    except ImportError:
        return None
    try:
        loaded = ctypes.CDLL(None)  # all that this process has loaded; some systems have no such thing
    except (OSError, TypeError):
        return None
    if not all(hasattr(loaded, name) for name in TEAM):
        return None
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(16, 8, digits=True, dots=bool(features.get("avx512vnni")))
    if features.get("avx2") and features.get("fma"):
        return Machine(8, 6, digits=True, dots=False, piece=128, abreast=12)
    return Machine(4, 8, digits=False, dots=False) if features.get("neon") else None


@functools.cache
def squares() -> bool:
    """Whether there is a unit for whole matrices of bytes. Finding out takes a process: only 8-bit products ask."""
    found = machine()
    if found is None or not found.dots:
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return bool(features.get("amx-int8") and features.get("amx-tile")) and matrix_unit_works()


def threads() -> int:
    """How many of them a kernel gets: as many as torch."""
    return torch.get_num_threads()
