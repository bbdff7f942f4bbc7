"""What a model will need and what the machine has, so that a refusal comes before the loading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slipstream.models.config import ModelConfig

MEMINFO = Path("/proc/meminfo")
# (limit, usage) of this process's control group: version 2, then version 1.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose."""

    weights: int
    kv: int
    drafter: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.drafter

    def fits(self, available: int) -> bool:
        return self.total <= available


def plan_memory(
    config: ModelConfig,
    element_size: int,
    context_tokens: int,
    *,
    kv_element_size: int | None = None,
    drafter: int = 0,
) -> MemoryPlan:
    """Memory for the weights at `element_size` bytes each and a cache of `context_tokens` tokens.

    `context_tokens` counts the tokens of all sequences together; `kv_element_size` is `element_size` unless given;
    `drafter` is whatever bytes the drafter asked for.
    """
    kv = config.kv_bytes_per_token(kv_element_size or element_size) * context_tokens
    return MemoryPlan(weights=config.parameters * element_size, kv=kv, drafter=drafter)


def available_bytes(device: str) -> int:
    """Bytes that can be had now on `device`: "cpu", "cuda" or "cuda:N"."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    limits = [limit for limit in (_meminfo(), _cgroup()) if limit is not None]
    return min(limits) if limits else _physical()


def _meminfo() -> int | None:
    """Linux's own estimate of what can be had without swapping."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    """What the container's limit leaves; None without a limit."""
    for limit, usage in CGROUPS:
        try:
            most, used = limit.read_text(encoding="ascii").strip(), usage.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if most.isdigit() and used.isdigit():
            # Version 1 writes a number near 2**63 for "no limit": larger than any machine, so min() drops it.
            return max(0, int(most) - int(used))
    return None


def _physical() -> int:
    """All the memory there is, where the system does not say how much of it is free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
