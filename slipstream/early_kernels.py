# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels that are launched while the one before them still runs. Importing this file imports triton.

A round is a chain of hundreds of kernels that take a few microseconds each, and the way from the end of one to the
beginning of the next takes one more. A GPU that can (Hopper and later) sets up a kernel during the one before it, if
both say so; the later one waits inside before it reads or writes anything.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """The first thing a kernel does: wait for all that was launched before it, and let the next one be set up."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def early(x: torch.Tensor) -> dict[str, bool]:
    """The arguments with which a kernel that begins `in_turn` is launched for tensors on the device of `x`."""
    return _arguments(x.device)


@functools.cache
def _arguments(device: torch.device) -> dict[str, bool]:
    able = device.type == "cuda" and hasattr(cuda, "gdc_wait") and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}
