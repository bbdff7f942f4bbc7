"""CUDA graphs: work recorded once on a GPU and replayed without the host, and the sizes it is recorded for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable

import torch


def bucket(count: int) -> int:
    """The size that `count` is padded to: a power of two, or one and a half of one.

    So few graphs serve every size, and at most a third of the work is padding.
    """
    power = 1 << (count - 1).bit_length()
    between = power // 4 * 3
    return between if power >= 4 and count <= between else power


def sizes(most: int) -> list[int]:
    """All sizes that counts up to `most` are padded to."""
    return sorted({bucket(count) for count in range(1, most + 1)})


class Graphs:
    """Functions by key. On a GPU each is captured as a graph and replayed; elsewhere it is simply called.

    A function reads its inputs from fixed tensors, writes its results to fixed tensors, and never synchronises with the
    host. One key means one function over the same tensors.
    """

    def __init__(self, device: str) -> None:
        self._records = device.startswith("cuda")
        self._ran: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # Graphs never run at the same time, so they share their memory.
        self._pool = torch.cuda.graph_pool_handle() if self._records else None
        self.cold = 0  # runs in which something may have been compiled or was captured
        self.capture_ms = 0.0  # spent on capturing, over all graphs

    def __len__(self) -> int:
        """How many functions have run; on a GPU each has a graph, or gets one when it runs again."""
        return len(self._ran)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run the function of this key once.

        The first call runs it eagerly: kernels are compiled and libraries allocate workspaces on first use, which
        cannot be captured. The second call captures it.
        """
        if not self._records or key not in self._ran:
            self.cold += key not in self._ran
            self._ran.add(key)
            function()
            return
        if key not in self._graphs:
            self.cold += 1
            self._graphs[key] = self._recorded(function)
        self._graphs[key].replay()

    def _recorded(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        # A graph of an earlier engine that the garbage collector drops meanwhile would break the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            # Other threads may use the GPU meanwhile: their work is not captured.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        finally:
            if collects:
                gc.enable()
        self.capture_ms += 1000 * (time.perf_counter() - began)
        return graph
