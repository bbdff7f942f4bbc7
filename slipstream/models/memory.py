"""The memory of the machine, so that a model is refused before it is loaded."""

from __future__ import annotations

import os
from pathlib import Path

KV_SHARE = 0.8  # share of the memory that the weights leave free; activations need memory too
SPARE_PAGES = 2  # of the cache, so that a single sequence at the end of its context still fits with its tree

MEMINFO = Path("/proc/meminfo")
# (limit, usage) of this process's control group: version 2, then version 1.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_bytes(device: str) -> int:
    """Bytes available now on `device`: "cpu", "cuda" or "cuda:N"."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    limits = [limit for limit in (_meminfo(), _cgroup()) if limit is not None]
    return min(limits) if limits else _physical()


def kv_bytes(device: str, share: float | None) -> int:
    """Bytes that K/V may take, after the weights are loaded.

    `share`: the part of a GPU's memory that everything together may take; None: of what is free.
    """
    free = available_bytes(device)
    if share is None or not device.startswith("cuda"):
        return int(free * KV_SHARE)
    import torch

    _, total = torch.cuda.mem_get_info(torch.device(device))
    return max(0, min(int(free * KV_SHARE), free - int((1.0 - share) * total)))


def _meminfo() -> int | None:
    """Linux's estimate of memory available without swapping."""
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
    """All memory, if the system does not say how much of it is free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
