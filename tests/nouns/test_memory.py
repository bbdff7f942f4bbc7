"""How much memory there is for a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from slipstream.models import memory


def test_available_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.available_bytes("cpu") > 0
    meminfo, limit, usage = tmp_path / "meminfo", tmp_path / "limit", tmp_path / "usage"
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path / "none", tmp_path / "none"), (limit, usage)))
    assert memory.available_bytes("cpu") == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    assert memory.available_bytes("cpu") == 8192
    for most, used, expected in (("5000", "1000", 4000), ("max", "1000", 8192), (str(2**63), "1", 8192), ("5", "9", 0)):
        limit.write_text(most + "\n")
        usage.write_text(used + "\n")
        assert memory.available_bytes("cpu") == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index or 0, 9))
    assert memory.available_bytes("cuda:3") == 3
