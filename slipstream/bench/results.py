"""`results.json`: what was measured, with what, on what; written, read and checked here."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.errors import CorruptFile, OptionError

FORMAT = "slipstream-bench"
VERSION = 1
_PACKAGES = ("torch", "numpy", "tokenizers", "triton", "llvmlite")

Json = dict[str, Any]


def provenance(arguments: Mapping[str, object]) -> Json:
    """When, where, with which versions and how: what a reader needs to repeat a run."""
    import torch

    from slipstream.models.memory import available_bytes
    from slipstream.native.machine import cpu_model

    versions: Json = {"slipstream": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    machine: Json = {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "free_memory": available_bytes("cpu"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": versions,
        "machine": machine,
        "arguments": {n: v for n, v in arguments.items() if not (v is None or v is False or v == ())},
        "command": sys.argv[1:],
    }


def _commit() -> str | None:
    """The commit of a clone, marked if files differ from it; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory(device: str) -> Json:
    """Bytes that this process had at most: in main memory, and on its GPU."""
    import resource

    import torch

    scale = 1 if sys.platform == "darwin" else 1024
    found: Json = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}
    if device != "cpu":
        found["device_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def save(results: Json, path: Path) -> None:
    """Write results; an unwritable path is an OptionError."""
    try:
        path.write_text(json.dumps(results, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def load(path: Path) -> Json:
    """Read results; what is not a file of ours is refused by name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CorruptFile(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CorruptFile(f"{str(path)!r} has no results of `slipstream bench`")
    if found.get("version") != VERSION:
        raise CorruptFile(f"{str(path)!r} has version {found.get('version')} of the format", hint=f"valid: {VERSION}")
    return found
