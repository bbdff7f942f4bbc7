"""`slipstream env`: the facts about a machine that a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from slipstream.commands.shared.options import Described
from slipstream.commands.shared.terminal import mebibytes, print_json, say, show_pairs

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "jinja2", "huggingface_hub", "typer", "rich",
    "llvmlite", "triton",
)  # fmt: skip
# Variables that affect us. Values of others (tokens, proxies) are private.
_VARIABLES = (
    "SLIPSTREAM_CACHE", "SLIPSTREAM_NATIVE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "KMP_AFFINITY", "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "NO_COLOR",
)  # fmt: skip


def env(as_json: Annotated[bool, Described("print JSON", ("--json",))] = False) -> None:
    """Describe this machine and installation."""
    report = {"versions": _versions(), **_hardware(), "cache": _cache(), "environment": _environment()}
    if as_json:
        print_json(report, indent=2)
        return
    for section, content in report.items():
        say(section, "title")
        show_pairs([(name, _plain(value)) for name, value in content.items()], indent="  ")


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not installed" if value is None else str(value)


def _versions() -> dict[str, str | None]:
    from slipstream import __version__

    found: dict[str, str | None] = {"slipstream": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return {**found, "system": platform.platform(), "executable": sys.executable}


def _hardware() -> dict[str, dict[str, Any]]:
    import torch

    from slipstream.models.layers.linear import packing_works
    from slipstream.models.memory import available_bytes
    from slipstream.native.machine import cpu_model

    cpu = {
        "model": cpu_model(),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "own kernels": _own_kernels(),
        "MKL packed products": packing_works(),
        "free memory": mebibytes(available_bytes("cpu")),
    }
    gpu: dict[str, Any] = {"available": torch.cuda.is_available(), "built for CUDA": str(torch.version.cuda)}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"capability {properties.major}.{properties.minor}"
        gpu[f"device {index}"] = f"{properties.name}, {mebibytes(properties.total_memory)}, {capability}"
    return {"cpu": cpu, "cuda": gpu}


def _own_kernels() -> str:
    from slipstream.models.layers.linear import native_works
    from slipstream.native.machine import has_amx, machine, switched_off

    if switched_off():
        return "no (SLIPSTREAM_NATIVE=0)"
    found = machine()
    if found is None or not native_works():
        return "no"
    digits = f"{'with' if found.int8 else 'without'} 8-bit and 4-bit GEMM"
    return f"vectors of {found.lanes} floats, {digits}{', with AMX' if has_amx() else ''}"


def _cache() -> dict[str, Any]:
    from slipstream import folders
    from slipstream.models.formats import builtin
    from slipstream.models.kept_weights import FOLDER, MOST_BYTES, kept_files

    folder = folders.cache_directory()
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    kept = kept_files()
    weights = f"{len(kept)} models, {mebibytes(sum(file.stat().st_size for file in kept))}, at most "
    weights += f"{mebibytes(MOST_BYTES)} or the newest, in {folder / FOLDER}"
    described: dict[str, Any] = {"directory": str(folder), "size": mebibytes(size), "packed weights": weights}
    for name, model in builtin.MODELS.items():
        there = (folder / model.filename).exists()
        described[name] = f"{'here' if there else 'not downloaded yet'} ({mebibytes(model.size)})"
    return described


def _environment() -> dict[str, str]:
    """The variables that are set."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}
