"""Triton kernels on a machine without a GPU: run by triton's interpreter, where triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# The interpreter makes numbers of arrays of one element, for the ends of loops; NumPy no longer does that by itself.
_LOOPS = """
from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor

def patch_loops(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = patch_loops
"""


def interpreted(script: str) -> str:
    """What a script prints, in a process of its own: the interpreter has to be chosen before kernels are imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        script = _LOOPS + script
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
