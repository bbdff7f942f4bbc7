"""Captured graphs: work recorded once on a GPU and replayed without the host, and the sizes it is recorded for."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch


def bucket(count: int) -> int:
    """The size that work of `count` is filled up to: a power of two, or one and a half of one.

    So few graphs serve every size, and at most a third of the work is for nothing.
    """
    power = 1 << (count - 1).bit_length()
    between = power // 4 * 3
    return between if power >= 4 and count <= between else power


class Graphs:
    """Functions by their keys. On a GPU each is recorded as a graph and replayed; elsewhere it is simply called.

    A function takes its inputs from tensors that stay where they are, leaves its results in such tensors, and asks the
    host for nothing. Whatever has one key is one function over the same tensors.
    """

    def __init__(self, device: str) -> None:
        self._records = device.startswith("cuda")
        self._ran: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # Graphs never run at the same time, so they share their memory.
        self._pool = torch.cuda.graph_pool_handle() if self._records else None
        self.capture_ms = 0.0  # spent on recording, all graphs together

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run the function of that key once.

        The first time it runs as it is: kernels are compiled and libraries make their workspaces when they are first
        used, which cannot be recorded. The second time it is recorded.
        """
        if not self._records or key not in self._ran:
            self._ran.add(key)
            function()
            return
        if key not in self._graphs:
            self._graphs[key] = self._recorded(function)
        self._graphs[key].replay()

    def _recorded(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        self.capture_ms += 1000 * (time.perf_counter() - began)
        return graph
