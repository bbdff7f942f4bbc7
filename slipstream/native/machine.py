"""The features of this CPU, and whether kernels can be compiled for it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch  # loads the OpenMP library whose threads the kernels use

from slipstream.errors import OptionError
from slipstream.native.matrix_unit import matrix_unit_works

_SWITCH = "SLIPSTREAM_NATIVE"
CALLED = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "sched_yield", "log")  # by the kernels


@dataclass(frozen=True)
class Machine:
    """`lanes`: floats of a vector; `tile_rows`: of a tile. `int8`: has kernels for 8-bit GEMMs; `vnni`: with the
    instruction for them, in vectors of 64 bytes. `piece`: inputs that several tiles process one after the other while
    their weights are in the L1 cache. `few_rows_sums`: accumulators of a float32 GEMM of few rows that reads several
    panels side by side; 0 where that is not known to be faster.
    """

    lanes: int
    tile_rows: int
    int8: bool
    vnni: bool
    piece: int = 64
    few_rows_sums: int = 0


def switched_off() -> bool:
    """Whether the user has switched the kernels off."""
    given = os.environ.get(_SWITCH, "1")
    if given not in ("0", "1"):
        raise OptionError(f"{_SWITCH}={given!r} is neither 0 nor 1", hint="leave it out to use the kernels")
    return given == "0"


@functools.cache
def machine() -> Machine | None:
    """This machine; None without a compiler, OpenMP or a supported vector unit, or if kernels are switched off."""
    if switched_off():
        return None
    try:
        from llvmlite import binding
    except ImportError:
        return None
    try:
        loaded = ctypes.CDLL(None)  # everything this process has loaded; not available on some systems
    except (OSError, TypeError):
        return None
    if not all(hasattr(loaded, name) for name in CALLED):
        return None
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(16, 8, int8=True, vnni=bool(features.get("avx512vnni")))
    if features.get("avx2") and features.get("fma"):
        return Machine(8, 6, int8=True, vnni=False, piece=128, few_rows_sums=12)
    return Machine(4, 8, int8=False, vnni=False) if features.get("neon") else None


@functools.cache
def has_amx() -> bool:
    """Whether there is a matrix unit (AMX). The check starts a process, so only 8-bit GEMMs ask."""
    found = machine()
    if found is None or not found.vnni:
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return bool(features.get("amx-int8") and features.get("amx-tile")) and matrix_unit_works()


def threads() -> int:
    """The number of threads of a kernel: as many as torch uses."""
    return torch.get_num_threads()


def cpu_model() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
