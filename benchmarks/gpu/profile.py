"""Where the time of a round goes, kernel by kernel, by the device's own profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.steps import standing
from slipstream import LLM

_ROUNDS = 4
_NAMED = 28  # kernels listed separately; the others are summed

# Kinds of kernels by parts of their names; the first match counts.
_KINDS = {
    "attention": ("attend", "combine"),
    "products": ("gemm", "gemv", "nvjet", "splitK", "cutlass", "_gates", "_onto"),
    "between products": ("_rotate_and_store", "_gate"),
}


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a half of a round."""

    drafter: str
    batch: int
    context: int
    half: str  # draft or verify
    kind: str
    kernel: str
    launches: float  # per round
    us: float  # per round, all launches together


def kernels(llm: LLM, drafter: str, context: int, batch: int = 1) -> list[Kernel]:
    """The kernels of both halves of a round, the longest first; `waiting` is time without a kernel."""
    with standing(llm, drafter, context, batch) as here:
        halves = (("draft", here.draft), ("verify", here.verify))
        return [
            Kernel(drafter, batch, context, half, *line)
            for half, work in halves
            if work is not None
            for line in _profiled(work, here.back)
        ]


def _profiled(work: Callable[[], None], back: Callable[[], None]) -> list[tuple[str, str, float, float]]:
    """Kind, name, launches and microseconds of the kernels that a piece of work runs."""
    back()
    work()
    back()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_ROUNDS):
            work()
        torch.cuda.synchronize()
    events = [e for e in seen.events() or () if e.device_type.name == "CUDA"]
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.time_range.elapsed_us())
    lines = [(_kind(name), name[:60], len(us) / _ROUNDS, sum(us) / _ROUNDS) for name, us in found.items()]
    lines.sort(key=lambda line: -line[3])
    span = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / _ROUNDS
    rest = lines[_NAMED:]
    return [
        *lines[:_NAMED],
        ("rest", f"{len(rest)} other kernels", sum(r[2] for r in rest), sum(r[3] for r in rest)),
        ("rest", "waiting", 0.0, span - sum(line[3] for line in lines)),
    ]


def _kind(name: str) -> str:
    for kind, parts in _KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "rest"
