"""Milliseconds on the device."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


def device_ms(work: Callable[[], None], times: int = 20, before_each: Callable[[], None] = lambda: None) -> float:
    """The median of `runs` runs, each between two events; the device is busy before the first."""
    before_each()
    work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for before, after in marks:
        before_each()
        before.record()
        work()
        after.record()
    torch.cuda.synchronize()
    return float(median(before.elapsed_time(after) for before, after in marks))


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up: libraries allocate their workspaces
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
