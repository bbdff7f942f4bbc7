"""From a name to a loaded model: checkpoint, memory check, weights, tokenizer."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from slipstream.errors import NotEnoughMemory, OptionError, unknown_choice
from slipstream.gpu.fused import has_triton
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint, AdapterConfig
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.formats.gguf_file import GGUFCheckpoint
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.formats.resolve import open_model
from slipstream.models.kept_weights import WeightsFile
from slipstream.models.layers.linear import int8_kernels_work
from slipstream.models.layers.quantized import MODES, int8_levels, quantized_bytes
from slipstream.models.memory import available_bytes
from slipstream.models.model import Model
from slipstream.text import Tokenizer

log = logging.getLogger("slipstream")

_LARGE = 2**30  # bytes of float32 weights from which on `auto` keeps a quantised file quantised
_WORTH_KEEPING = 300_000_000  # parameters that take about two seconds to quantise
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIASES = {"float": "float32", "half": "float16"}  # vLLM's


def choose_device(device: str) -> str:
    """`auto`: the GPU if there is one. An unknown device or a missing GPU is refused."""
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
    dtype = _ALIASES.get(dtype, dtype)
    if dtype not in _DTYPES:
        raise unknown_choice("dtype", dtype, ["auto", *_DTYPES])
    return _DTYPES[dtype]


def choose_quantize(quantize: str, checkpoint: Checkpoint | AdapterCheckpoint, dtype: torch.dtype, device: str) -> str:
    """`auto`: int8 for a large GGUF file of quantised weights on a CPU, otherwise none."""
    if quantize not in ("auto", *MODES):
        raise unknown_choice("quantize", quantize, ["auto", *MODES])
    if quantize == "none":
        return quantize
    if quantize == "auto":
        wanted = isinstance(checkpoint, GGUFCheckpoint) and _is_large_and_quantised(checkpoint)
        return "int8" if wanted and _obstacle(checkpoint, dtype, device) is None else "none"
    if obstacle := _obstacle(checkpoint, dtype, device):
        raise OptionError(f"quantize={quantize!r}: {obstacle}", hint="use none or auto")
    return quantize


def _is_large_and_quantised(checkpoint: GGUFCheckpoint) -> bool:
    """A file is quantised if it is smaller than its weights in 16 bits."""
    config = checkpoint.config
    return weight_bytes(config, torch.float32) >= _LARGE and checkpoint.path.stat().st_size < 2 * config.parameters


def _obstacle(checkpoint: Checkpoint | AdapterCheckpoint, dtype: torch.dtype, device: str) -> str | None:
    """Why weights cannot be quantised here, or None."""
    if device != "cpu":
        return f"weights are quantised on a CPU only, and this is {device}"
    if dtype != torch.float32:
        return f"quantised weights compute in float32, not in {_name(dtype)}"
    if isinstance(checkpoint, AdapterCheckpoint):
        return f"{checkpoint.name} runs through transformers, which keeps its weights as they are"
    return None if int8_levels() else "8-bit GEMMs are not computed correctly on this CPU"


def require_exact(checkpoint: Checkpoint | AdapterCheckpoint, dtype: torch.dtype, device: str) -> None:
    """Refuse `exact` if it is known before loading that the kernels are not batch-invariant."""
    if device == "cpu":
        if dtype != torch.float32:
            raise OptionError(f"exact: on a CPU GEMMs in {_name(dtype)} are not exact", hint="use dtype float32")
        return
    if isinstance(checkpoint, AdapterCheckpoint):
        raise OptionError(f"exact: {checkpoint.name} runs through transformers", hint="use device cpu, or leave it out")
    if checkpoint.config.experts:
        raise OptionError("exact: mixtures of experts are exact on a CPU only", hint="use device cpu, or leave it out")
    if not has_triton():
        raise OptionError("exact: its kernels on a GPU need triton", hint="pip install triton, or leave it out")


def load_model(
    model: str | Path | Checkpoint,
    *,
    dtype: str | torch.dtype,
    device: str,
    quantize: str = "auto",
    exact: bool = False,
) -> tuple[Model, Tokenizer | None]:
    """Load a model, by name or already opened, and its tokenizer. Memory is checked before anything is read."""
    device = choose_device(device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # our own kernels and captured graphs run on the current device
    chosen = choose_dtype(dtype, device)
    checkpoint = open_model(model) if isinstance(model, str | Path) else model
    mode = choose_quantize(quantize, checkpoint, chosen, device)
    if exact:
        require_exact(checkpoint, chosen, device)
    require_memory(checkpoint.name, checkpoint.config, chosen, device, mode)
    if isinstance(checkpoint, AdapterCheckpoint):
        from slipstream.models.adapter import Adapter  # needs transformers, which the decoder does not

        adapter = Adapter(checkpoint, chosen, device)
        log.warning("%s: it runs through transformers, slower than natively", checkpoint.why)
        return adapter, checkpoint.tokenizer()
    with ThreadPoolExecutor(1) as beside:  # a tokenizer takes as long to load as a small model's weights
        tokenizer = beside.submit(checkpoint.tokenizer)
        decoder = Decoder(checkpoint, chosen, device, mode, exact=exact, weights_file=_weights_file(checkpoint, mode))
        return decoder, tokenizer.result()


def _weights_file(checkpoint: Checkpoint, mode: str) -> WeightsFile | None:
    """The cache file of the quantised weights of a large model, whose conversion would dominate the start."""
    if mode == "none" or checkpoint.config.parameters < _WORTH_KEEPING or not int8_kernels_work():
        return None
    if isinstance(checkpoint, GGUFCheckpoint):
        return WeightsFile([checkpoint.path], mode)
    if isinstance(checkpoint, HFCheckpoint):
        return WeightsFile([checkpoint.path / "config.json", *sorted(checkpoint.path.glob("*.safetensors"))], mode)
    return None


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantize: str = "none") -> int:
    """Memory of the weights. In float32 our decoder keeps a packed copy of a tied head beside the embedding table."""
    if quantize != "none":
        return quantized_bytes(config, quantize)
    count = config.parameters
    if config.tied_head and dtype == torch.float32 and not isinstance(config, AdapterConfig):
        count += config.vocab_size * config.hidden_size
    return count * dtype.itemsize


def require_memory(name: str, config: ModelConfig, dtype: torch.dtype, device: str, quantize: str = "none") -> None:
    """Raise NotEnoughMemory if the weights alone would not fit."""
    needed, free = weight_bytes(config, dtype, quantize), available_bytes(device)
    if needed > free:
        raise NotEnoughMemory(
            f"{name} needs {needed / 2**20:,.0f} MiB for its weights in "
            f"{_name(dtype) if quantize == 'none' else quantize} and {free / 2**20:,.0f} MiB are free on {device}",
            hint="choose a smaller model or a smaller dtype, or on a CPU quantize int8 or int4",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
