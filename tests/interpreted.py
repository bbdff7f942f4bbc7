"""Triton kernels in tests: on the GPU if there is one, else in Triton's interpreter, in the test's own process.

A test with the marker `kernels` imports kernel modules in its body. It is skipped where Triton is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

INSTALLED = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choose_interpreter() -> None:
    """Triton reads this when it is first imported: before any test runs. On a GPU there is nothing to interpret."""
    if INSTALLED and DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if DEVICE == "cuda":  # `fresh_memory_is_nan` asks for deterministic algorithms, and cuBLAS has them with this alone
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@functools.cache
def mend_interpreter() -> None:
    """Three things that Triton's interpreter leaves to NumPy, and NumPy does not do.

    An array of one element is the end of a loop. A row of a product of tiles does not depend on the other rows: BLAS
    takes other instructions at the edges of a matrix. A mask is boolean, whatever it was combined with.
    """
    if DEVICE != "cpu":
        return
    import numpy as np
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_loops(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = (part.data.astype(d.data.dtype) for part in (a, b))
        total = np.zeros_like(d.data)
        for inner in range(left.shape[-1]):
            total += left[..., :, inner, None] * right[..., None, inner, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    load, store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{what}") for what in ("load", "store"))

    def boolean(mask: Any) -> Any:  # of a block pointer it is an array, and boolean
        whole = isinstance(mask, interpreter.TensorHandle)
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype) if whole else mask

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        return load(self, pointers, boolean(mask), *rest, **options)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        return store(self, pointers, value, boolean(mask), *rest, **options)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    interpreter.InterpreterBuilder.create_masked_store = create_masked_store
    interpreter._patch_lang_tensor = patch_loops
    interpreter.InterpreterBuilder.create_dot = create_dot
