"""A Hugging Face directory (config.json and safetensors) as a Checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.errors import CorruptFile, ModelNotFound, ShapeMismatch, UnsupportedModel
from slipstream.models.config import ModelConfig
from slipstream.models.formats.hf_config import config_from_hf, family_of
from slipstream.models.mtp import mtp_tensors
from slipstream.models.shapes import expected_shape, weight_names

if TYPE_CHECKING:
    from slipstream.text import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
HEAD = "lm_head.weight"
# Tables in old files that follow from the config and are ignored.
DERIVED = "rotary_emb.inv_freq"

TABLES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": HEAD}
PARTS = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# The norm after attention has the name of the norm before the MLP elsewhere.
POST_NORM_PARTS = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
MIXTRAL, MIXTRAL_PARTS = "block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"}
LAYERS, MTP_JOINT = "model.layers.", "eh_proj.weight"


@dataclass(frozen=True)
class Piece:
    """Where a canonical weight is: in tensor `tensor`, whose stored shape must be `whole`, at `index`."""

    tensor: str
    whole: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


class HFCheckpoint:
    """A directory, opened: every tensor's presence, shape and dtype is checked, none is read before `weight`."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or str(path)
        raw = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self._files = open_files(self.path)
        self.config = config_from_hf(
            raw, read_json(generation) if generation.exists() else {}, self.name, has_head=HEAD in self._files
        )
        self._norms_from_one = family_of(raw, self.name).norms_from_one
        self.mtp = mtp_tensors(self._files, LAYERS, MTP_JOINT, self.config.layers)
        self._pieces = {name: self._place(name) for name in weight_names(self.config)}
        used = {piece.tensor for piece in self._pieces.values()} | {HEAD, *self.mtp}
        unknown = sorted(tensor for tensor in self._files.keys() - used if not tensor.endswith(DERIVED))
        if unknown:
            raise UnsupportedModel(f"{self.name} has tensor {unknown[0]!r}, which {self.config.family} does not use")

    def weight(self, name: str) -> torch.Tensor:
        """One tensor by canonical name, in the dtype of the file; float32 for a norm that multiplies by 1 + w."""
        stored = self._read(self._pieces[name])
        return 1.0 + stored.float() if self._norms_from_one and name.endswith("norm") else stored

    def _read(self, piece: Piece) -> torch.Tensor:
        try:
            if piece.index:
                part: torch.Tensor = self._files[piece.tensor].get_slice(piece.tensor)[piece.index]
                return part.contiguous()
            whole: torch.Tensor = self._files[piece.tensor].get_tensor(piece.tensor)
            return whole
        except (SafetensorError, OSError) as error:
            raise CorruptFile(f"cannot read tensor {piece.tensor!r} of {self.name}: {_one_line(error)}") from error

    def tokenizer(self) -> Tokenizer | None:
        """The directory's tokenizer; None if it has none."""
        from slipstream.text import Tokenizer
        from slipstream.text.directory import SLOW_FILES

        if not any((self.path / file).exists() for file in ("tokenizer.json", *SLOW_FILES)):
            return None
        return Tokenizer.from_directory(self.path)

    def _place(self, name: str) -> Piece:
        piece = _locate(name, self.config, self._files)
        if piece.tensor not in self._files:
            raise CorruptFile(f"{self.name} lacks tensor {piece.tensor!r}")
        stored = self._files[piece.tensor].get_slice(piece.tensor)
        if (found := tuple(stored.get_shape())) != piece.whole:
            raise ShapeMismatch(f"tensor {piece.tensor!r} of {self.name} has shape {found}, expected {piece.whole}")
        if stored.get_dtype() not in DTYPES:
            raise UnsupportedModel(f"tensor {piece.tensor!r} of {self.name} is stored as {stored.get_dtype()}")
        return piece


def _locate(name: str, config: ModelConfig, tensors: Mapping[str, Any]) -> Piece:
    """The piece that holds canonical weight `name`, in any supported layout."""
    shape = expected_shape(config, name)
    if name in TABLES:
        return Piece(TABLES[name], shape)
    _, layer, part = name.split(".", 2)
    prefix = f"{LAYERS}{layer}"
    parts = PARTS | POST_NORM_PARTS if config.post_norms else PARTS
    if part in parts:
        return Piece(f"{prefix}.{parts[part]}", shape)
    # One matrix per expert, by Mixtral's names or the others', or the stacks of transformers 5.
    block = MIXTRAL if f"{prefix}.{MIXTRAL}.gate.weight" in tensors else "mlp"
    if part == "router":
        return Piece(f"{prefix}.{block}.gate.weight", shape)
    _, number, part = part.split(".")
    experts = f"{prefix}.{block}.experts"
    if f"{experts}.gate_up_proj" not in tensors:
        matrix = MIXTRAL_PARTS[part] if block == MIXTRAL else f"{part}_proj"
        return Piece(f"{experts}.{number}.{matrix}.weight", shape)
    expert, (rows, columns) = int(number), shape
    if part == "down":
        return Piece(f"{experts}.down_proj", (config.experts, *shape), (expert,))
    half = slice(0, rows) if part == "gate" else slice(rows, 2 * rows)
    return Piece(f"{experts}.gate_up_proj", (config.experts, 2 * rows, columns), (expert, half))


def open_files(directory: Path) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it. Only headers are read."""
    single, index = directory / WEIGHTS, directory / INDEX
    if index.exists() and not single.exists():
        return _open_shards(directory, index)
    if not single.exists():
        if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
            raise UnsupportedModel(
                f"{directory} holds pickled weights only", hint="save them as safetensors (safe_serialization=True)"
            )
        raise ModelNotFound(f"{directory} has neither {WEIGHTS} nor {INDEX}")
    file = _open_file(single)
    return dict.fromkeys(file.keys(), file)


def _open_shards(directory: Path, index: Path) -> dict[str, Any]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CorruptFile(f"{index} has no weight_map from tensors to files")
    shards: dict[str, Any] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard or not (directory / shard).exists():
            raise CorruptFile(f"{index} names {shard!r}, which is not in the directory")
        shards[shard] = _open_file(directory / shard)
    held = {shard: set(file.keys()) for shard, file in shards.items()}
    for tensor, shard in places.items():
        if tensor not in held[shard]:
            raise CorruptFile(f"{directory / shard} lacks tensor {tensor!r}, which {INDEX} puts there")
    return {tensor: shards[shard] for tensor, shard in places.items()}


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"{path} is truncated or garbled: {_one_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CorruptFile or ModelNotFound names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} is not a JSON object")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
