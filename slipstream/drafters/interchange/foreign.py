"""Drafters of other projects: a directory with a config.json and weights under names of their own."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream.drafters.heads.head_checkpoint import write_tensors
from slipstream.errors import CorruptFile, ModelNotFound, OptionError, ShapeMismatch, UnsupportedModel
from slipstream.models.formats.hf_render import save_tokenizer
from slipstream.text import Tokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Foreign:
    """A drafter of another project. `name` is for messages. A whole model comes with its tokenizer."""

    name: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None = None

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse weights that are missing, unknown, or of another shape than in `shapes`."""
        missing = sorted(shapes.keys() - self.weights.keys())
        if missing:
            raise CorruptFile(f"{self.name} lacks {_few(missing)}", hint="is the download complete?")
        unknown = sorted(self.weights.keys() - shapes.keys())
        if unknown:
            raise self.refuse(f"has unknown weights: {_few(unknown)}")
        for key, shape in shapes.items():
            found = tuple(self.weights[key].shape)
            if found != shape:
                raise ShapeMismatch(f"{self.name}: {key} is {list(found)}, but should be {list(shape)}")

    def refuse(self, what: str) -> UnsupportedModel:
        """The error for something that cannot be represented exactly."""
        return UnsupportedModel(f"{self.name} {what}", hint="it cannot be imported without changing what it drafts")

    @property
    def dtype(self) -> str:
        """The dtype of its matrices, in torch's spelling."""
        kinds = {str(w.dtype).removeprefix("torch.") for w in self.weights.values() if w.is_floating_point()}
        if len(kinds) != 1 or not kinds <= {"float32", "bfloat16", "float16"}:
            raise self.refuse(f"has weights of type {' and '.join(sorted(kinds)) or 'integer'}")
        return kinds.pop()


def read_foreign(place: Path) -> Foreign:
    """Read a directory; errors name the file. Pickled files are read as plain tensors, without running code."""
    if not place.is_dir():
        raise ModelNotFound(f"{str(place)!r} is not a directory", hint="name the directory that holds the drafter")
    files = weight_files(place)
    if not files:
        raise ModelNotFound(f"{place} holds no weights", hint="they would be .safetensors, .bin or .pt files")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= _tensors(file)
    return Foreign(place.name, _config(place / CONFIG), weights)


def weight_files(place: Path) -> list[Path]:
    """The weight files of a directory; of two copies the one that is not pickled."""
    return sorted(place.glob("*.safetensors")) or sorted([*place.glob("*.bin"), *place.glob("*.pt")])


def write_foreign(place: Path, foreign: Foreign) -> None:
    """Write a new directory atomically."""
    if place.exists():
        raise OptionError(f"{str(place)!r} exists", hint="name a directory that does not exist")
    partial = place.with_name(f".{place.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        (partial / CONFIG).write_text(json.dumps(foreign.config, indent=2) + "\n")
        if foreign.tokenizer is not None:
            save_tokenizer(foreign.tokenizer, partial)
        write_tensors(partial / WEIGHTS, foreign.weights, {"format": "pt"})
        partial.rename(place)
    except OSError as error:
        raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CorruptFile(f"{file} is not a JSON object")
    return config


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CorruptFile(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not all(isinstance(weight, torch.Tensor) for weight in found.values()):
        raise CorruptFile(f"{file} does not hold named tensors")
    return found


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
