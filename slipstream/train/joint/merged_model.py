"""Low-rank updates merged into the weights of a model: in memory, and as a new Hugging Face directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from slipstream.drafters.heads.head_checkpoint import write_tensors
from slipstream.models.config import ModelConfig
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.formats.hf import (
    INDEX,
    LAYERS,
    PARTS,
    POST_NORM_PARTS,
    TABLES,
    WEIGHTS,
    HFCheckpoint,
    open_files,
)
from slipstream.models.formats.hf_render import rendered_config, save_tokenizer
from slipstream.models.shapes import weight_names
from slipstream.text import Tokenizer
from slipstream.train.joint.model import Factors

CONFIG = "config.json"
_SHARD = 4 << 30  # bytes of one weight file, about
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # files beside weights, mainly the tokenizer's
_NOTICES = ("LICENSE", "LICENCE", "NOTICE")  # they apply to derived models too


class MergedCheckpoint:
    """A checkpoint with updates merged into its matrices; all other weights are the original's, bit for bit.

    Updated matrices keep the dtype of the training: a narrower one could round an update away.
    """

    def __init__(self, original: Checkpoint, updates: Mapping[str, Factors], dtype: torch.dtype) -> None:
        self.config = original.config
        self.name = f"{original.name}, tuned"
        self.mtp = original.mtp
        self.original = original
        self.updates = updates  # by canonical name
        self._dtype = dtype

    def weight(self, name: str) -> torch.Tensor:
        """One tensor by canonical name."""
        weight = self.original.weight(name)
        if name not in self.updates:
            return weight
        return (weight.float() + self.updates[name].product).to(self._dtype)

    def tokenizer(self) -> Tokenizer | None:
        """The original's tokenizer."""
        return self.original.tokenizer()


def write_model(merged: MergedCheckpoint, folder: Path) -> None:
    """Write a whole model to an empty directory: weights, config and tokenizer."""
    _describe(merged.original, folder)
    _save(_tensors(merged), folder)


def require_writable(original: Checkpoint) -> None:
    """Refuse, before training, a model that could not be written as a Hugging Face directory."""
    with tempfile.TemporaryDirectory(prefix="slipstream-train-") as folder:
        _describe(original, Path(folder))


def _describe(original: Checkpoint, folder: Path) -> None:
    """Config and tokenizer: copied if the original is a Hugging Face directory, else rendered."""
    if isinstance(original, HFCheckpoint):
        for file in sorted(original.path.iterdir()):
            beside = file.suffix in _COPIED and not file.name.endswith(".index.json")
            if file.is_file() and (beside or file.name.upper().startswith(_NOTICES)):
                shutil.copyfile(file, folder / file.name)
        return
    raw, _ = rendered_config(original.config, original.name)
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    tokenizer = original.tokenizer()
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def _tensors(merged: MergedCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the new model by its Hugging Face name."""
    original, config = merged.original, merged.config
    if isinstance(original, HFCheckpoint):
        updated = {hf_name(config, name): name for name in merged.updates}
        for tensor, file in open_files(original.path).items():
            yield tensor, merged.weight(updated[tensor]) if tensor in updated else file.get_tensor(tensor)
        return
    _, family = rendered_config(config, original.name)
    for name in weight_names(config):
        weight = merged.weight(name)
        yield hf_name(config, name), weight - 1 if family.norms_from_one and name.endswith("norm") else weight


def hf_name(config: ModelConfig, name: str) -> str:
    """The Hugging Face name of a dense model's weight."""
    if name in TABLES:
        return TABLES[name]
    _, layer, part = name.split(".")
    return f"{LAYERS}{layer}.{(PARTS | POST_NORM_PARTS if config.post_norms else PARTS)[part]}"


def _save(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write tensors as they come, in files that fit into memory; a single file needs no index."""
    places: dict[str, str] = {}
    total, batch = 0, dict[str, torch.Tensor]()

    def write() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        write_tensors(folder / file, batch, {"format": "pt"})
        places.update(dict.fromkeys(batch, file))
        batch.clear()

    for name, tensor in tensors:
        total += tensor.nbytes
        batch[name] = tensor
        if sum(held.nbytes for held in batch.values()) >= _SHARD:
            write()
    if batch:
        write()
    if len(files := set(places.values())) == 1:
        (folder / files.pop()).rename(folder / WEIGHTS)
    else:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
