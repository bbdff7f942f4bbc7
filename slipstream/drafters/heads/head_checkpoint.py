"""Checkpoints of trained drafters: directories that describe themselves.

`drafter.json` holds the format version, the method, its settings, the target it was trained for, its provenance and its
measured figures; `weights.safetensors` the weights and `vocab`, the target's ids of the draft tokens. Matrices may be
quantized (`weight_codec.py`); the trainer compares the result with float32 by decoding.

Checkpoints of the package are in `drafters/shipped`, the user's own in the cache or where `checkpoint=` points. The
user's own take precedence.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.drafters.heads.weight_codec import packed, unpacked
from slipstream.errors import CorruptFile, ModelNotFound, OptionError
from slipstream.folders import cache_directory, expanded
from slipstream.models.config import ModelConfig

FORMAT, VERSION = "slipstream-drafter", 1
DESCRIPTION, WEIGHTS = "drafter.json", "weights.safetensors"
HASH = "weights_sha256"  # what a description calls the hash of the file of weights
SHIPPED = Path(__file__).parents[1] / "shipped"
_SHAPE = ("vocab_size", "hidden_size", "layers")  # of a target


@dataclass(frozen=True)
class Made:
    """The target that a drafter was made for."""

    fingerprint: str
    name: str
    vocab_size: int
    hidden_size: int
    layers: int


@dataclass(frozen=True)
class Trained:
    """A trained drafter on disk."""

    method: str
    settings: dict[str, Any]
    target: Made
    vocab: torch.Tensor  # [draft tokens], int64, ascending
    weights: dict[str, torch.Tensor]
    provenance: dict[str, Any] = field(default_factory=dict)  # versions, arguments, data
    figures: dict[str, Any] = field(default_factory=dict)  # what was measured of it

    def require_shape(self, method: str, config: ModelConfig, where: Path) -> None:
        """Refuse a checkpoint of another method, or for a target of another shape."""
        if self.method != method:
            raise OptionError(f"{where} holds a drafter of kind {self.method!r}, not {method!r}")
        for name in _SHAPE:
            if getattr(self.target, name) != getattr(config, name):
                raise OptionError(
                    f"{where} was trained for {self.target.name}, which has {name}={getattr(self.target, name)}, but "
                    f"this target has {getattr(config, name)}",
                    hint=f"train one for this target: slipstream train {method} -m MODEL",
                )

    def require(self, method: str, fingerprint: str, where: Path) -> None:
        """Refuse a checkpoint of another method, or for another target."""
        if self.method != method:
            raise OptionError(f"{where} holds a drafter of kind {self.method!r}, not {method!r}")
        if self.target.fingerprint != fingerprint:
            raise OptionError(
                f"{where} was trained for {self.target.name} ({self.target.fingerprint}), and this target is another "
                f"({fingerprint})",
                hint=f"train one for this target: slipstream train {method} -m MODEL",
            )


def directory(method: str, fingerprint: str) -> Path:
    """Default path of the user's own drafter of a kind for a target."""
    return own_folder() / f"{method}-{fingerprint}"


def own_folder() -> Path:
    """The folder of the user's own drafters."""
    return cache_directory() / "drafters"


def find(method: str, fingerprint: str) -> Path | None:
    """The drafter of this kind for this target, if there is one."""
    for place in (directory(method, fingerprint), SHIPPED / f"{method}-{fingerprint}"):
        if (place / DESCRIPTION).exists():
            return place
    return None


def of_shape(method: str, config: ModelConfig) -> list[Path]:
    """The drafters of this kind made for a target of this shape, the user's own first. Only the fingerprint identifies
    the target.
    """
    places = [found for folder in (own_folder(), SHIPPED) for found in sorted(folder.glob(f"{method}-*"))]
    return [place for place in places if (place / DESCRIPTION).exists() and _has_shape(place, config)]


def _has_shape(place: Path, config: ModelConfig) -> bool:
    target = describe(place).get("target")
    return isinstance(target, dict) and all(target.get(name) == getattr(config, name) for name in _SHAPE)


def own(method: str, fingerprint: str, instead: str = "") -> Path:
    """The drafter of this kind for this target. If there is none, OptionError suggests `instead`."""
    place = find(method, fingerprint)
    if place is None:
        raise OptionError(
            f"no {method} drafter has been trained for this target ({fingerprint})",
            hint=", or ".join(filter(None, (f"slipstream train {method} -m MODEL", instead))),
        )
    return place


def named(given: str, kinds: Collection[str]) -> Path | None:
    """The directory that a checkpoint was given as; None if it was given as a kind, to be looked up for the target.

    A directory counts only if it holds a checkpoint, so another one with a kind's name hides nothing.
    """
    place = expanded(given)
    if (place / DESCRIPTION).exists():
        return place
    if given in kinds:
        return None
    raise ModelNotFound(
        f"{place} holds no trained drafter", hint=f"it would have a {DESCRIPTION}; or name a kind: {', '.join(kinds)}"
    )


def load(place: Path) -> Trained:
    """Read a checkpoint; errors name the file and a hint."""
    description = describe(place)
    try:
        stored = load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CorruptFile(f"{place / WEIGHTS} cannot be read: {error}", hint="train or copy it again") from None
    if "vocab" not in stored:
        raise CorruptFile(f"{place / WEIGHTS} has no vocabulary", hint="train or copy it again")
    vocab = stored.pop("vocab").long()
    try:
        return Trained(
            method=str(description["method"]),
            settings=dict(description["settings"]),
            target=Made(**description["target"]),
            vocab=vocab,
            weights=unpacked(stored),
            provenance=dict(description.get("provenance", {})),
            figures=dict(description.get("figures", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{place / DESCRIPTION} is not complete: {error!r}", hint="train or copy it again") from None


def describe(place: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; errors name the file."""
    file = place / DESCRIPTION
    if not file.exists():
        raise ModelNotFound(f"{place} holds no trained drafter", hint=f"it would have a {DESCRIPTION}")
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{file} cannot be read: {error}", hint="train or copy it again") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CorruptFile(f"{file} does not describe a drafter")
    if description.get("version") != VERSION:
        raise CorruptFile(f"{file} has format version {description.get('version')}; this program reads {VERSION}")
    return description


def save(place: Path, trained: Trained, *, bits: int | None = None, files: Mapping[str, str] | None = None) -> None:
    """Write a checkpoint atomically. `bits`: 6 or 8 for matrices, and bfloat16 for the rest; None: unchanged. `files`:
    texts to write next to it, by name.
    """
    description = {
        "format": FORMAT,
        "version": VERSION,
        "method": trained.method,
        "settings": trained.settings,
        "target": asdict(trained.target),
        "draft_tokens": len(trained.vocab),
        "provenance": trained.provenance,
        "figures": trained.figures,
    }
    stored = dict(trained.weights) if bits is None else packed(trained.weights, bits)
    stored["vocab"] = trained.vocab.to(torch.int32)
    partial = place.with_name(f".{place.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_tensors(partial / WEIGHTS, stored)
        with (partial / WEIGHTS).open("rb") as content:
            description[HASH] = hashlib.file_digest(content, "sha256").hexdigest()
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        for name, text in (files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        put(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file of tensors; a failing disk is an OSError, as with any other file."""
    file.touch()
    mode = file.stat().st_mode  # the default here; the library makes files readable by the owner alone
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file, metadata)
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from None
    file.chmod(mode)


def put(ready: Path, place: Path) -> None:
    """Move a directory, perhaps in place of another one; there is never a partial one."""
    partial = ready
    if ready.parent != place.parent:  # perhaps on another disk, from which it cannot be moved at once
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(ready, partial)
    old = place.with_name(f".{place.name}-old-{os.getpid()}")
    if place.exists():
        place.rename(old)
    try:
        partial.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)
