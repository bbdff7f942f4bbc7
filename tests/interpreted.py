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
    """Two things that Triton's interpreter leaves to NumPy, and NumPy does not do.

    An array of one element is the end of a loop. A row of a product of tiles does not depend on the other rows: BLAS
    takes other instructions at the edges of a matrix.
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

    interpreter._patch_lang_tensor = patch_loops
    interpreter.InterpreterBuilder.create_dot = create_dot
