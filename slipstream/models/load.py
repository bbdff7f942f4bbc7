"""From a name to a model that runs: checkpoint, memory check, weights, tokenizer."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from slipstream.errors import NotEnoughMemory, OptionError, unknown_choice
from slipstream.models.adapter_checkpoint import AdapterCheckpoint, AdapterConfig
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.loader import open_model
from slipstream.models.memory import available_bytes
from slipstream.models.model import Model
from slipstream.text import Tokenizer

log = logging.getLogger("slipstream")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> str:
    """`auto`: the GPU if there is one. An unknown device, or a GPU that is not there, is refused."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if found is None:
        raise unknown_choice("device", device, ["auto", "cpu", "cuda", "cuda:N"])
    count = torch.cuda.device_count()
    if int(found[1] or 0) >= count:
        raise OptionError(f"device={device!r}, but there are {count} CUDA devices here", hint="use cpu or auto")
    return device


def choose_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, float32 on a CPU (where 16-bit arithmetic is slower and not exact)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if dtype not in _DTYPES:
        raise unknown_choice("dtype", dtype, ["auto", *_DTYPES])
    return _DTYPES[dtype]


def load_model(
    model: str | Path | Checkpoint, *, dtype: str | torch.dtype, device: str
) -> tuple[Model, Tokenizer | None]:
    """Load a model, by name or opened already, and its tokenizer. Too little memory is told before anything is read."""
    device = choose_device(device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # kernels of our own and captured graphs run on the current one
    chosen = choose_dtype(dtype, device)
    checkpoint = open_model(model) if isinstance(model, str | Path) else model
    require_memory(checkpoint.name, checkpoint.config, chosen, device)
    if not isinstance(checkpoint, AdapterCheckpoint):
        return Decoder(checkpoint, chosen, device), checkpoint.tokenizer()
    from slipstream.models.adapter import Adapter  # needs transformers, which the decoder does not

    adapter = Adapter(checkpoint, chosen, device)
    log.warning("%s: it runs through transformers, slower than natively", checkpoint.why)
    return adapter, checkpoint.tokenizer()


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of the weights. In float32 our decoder packs a tied head beside the embedding table."""
    count = config.parameters
    if config.tied_head and dtype == torch.float32 and not isinstance(config, AdapterConfig):
        count += config.vocab_size * config.hidden_size
    return count * dtype.itemsize


def require_memory(name: str, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
    """Raise NotEnoughMemory if the weights alone would not fit."""
    needed, free = weight_bytes(config, dtype), available_bytes(device)
    if needed > free:
        raise NotEnoughMemory(
            f"{name} needs {needed / 2**20:,.0f} MiB for its weights in {str(dtype).removeprefix('torch.')} "
            f"and {free / 2**20:,.0f} MiB are free on {device}",
            hint="choose a smaller model or a smaller dtype",
        )
