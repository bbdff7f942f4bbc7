"""From a user's model name to an opened checkpoint: a built-in name, a path, or a repository on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import ModelNotFound, UnsupportedModel
from slipstream.folders import expanded
from slipstream.models.formats import builtin, hub
from slipstream.models.formats.builtin import OnProgress
from slipstream.models.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint


def open_checkpoint(model: str | Path, progress: OnProgress | None = None) -> Checkpoint:
    """Opens `model` for our own decoder: a built-in name, a directory or GGUF file, or a hub id, in this order.

    A built-in model is downloaded on first use; `progress` gets (bytes done, bytes in all).
    """
    return _open_path(_find(model, progress), str(model))


def open_model(model: str | Path) -> Checkpoint | AdapterCheckpoint:
    """Opens `model` for our own decoder, or its directory for transformers if only that can run it."""
    path, name = _find(model), str(model)
    try:
        return _open_path(path, name)
    except UnsupportedModel as refusal:
        if not path.is_dir():
            raise
        from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint

        try:
            return AdapterCheckpoint(path, name, refusal)
        except ImportError:
            what = f"{refusal.message}; transformers, which may run it, is not installed"
            raise UnsupportedModel(what, hint="pip install 'slipstream[hf]'") from None


def _find(model: str | Path, progress: OnProgress | None = None) -> Path:
    name = str(model)
    if name in builtin.MODELS and isinstance(model, str):
        return builtin.fetch(name, progress)
    path = expanded(name)
    if name and path.exists():
        return path
    # A Path must be on disk; so must a name that starts like one.
    if isinstance(model, str) and not name.startswith((".", "/", "~")) and hub.is_reference(name):
        return hub.download(name)
    raise ModelNotFound(
        f"no such model: {name!r}",
        hint=f"give a directory, a .gguf file, a hub id (owner/name) or one of: {', '.join(sorted(builtin.MODELS))}",
    )


def _open_path(path: Path, name: str) -> Checkpoint:
    # Imported here: both need torch, and a mistyped name should not wait for it.
    if path.is_dir():
        from slipstream.models.formats.hf import HFCheckpoint

        _require_config(path)
        return HFCheckpoint(path, name)
    if path.suffix in (".safetensors", ".bin", ".json"):
        raise ModelNotFound(f"{path} is a part of a model", hint=f"give its directory, {path.parent}")
    from slipstream.models.formats.gguf_file import GGUFCheckpoint

    return GGUFCheckpoint(path, name)


def _require_config(directory: Path) -> None:
    if (directory / "config.json").exists():
        return
    files = sorted(file.name for file in directory.iterdir())
    inside = [file for file in files if file.endswith(".gguf")]
    if inside:
        raise ModelNotFound(f"{directory} has no config.json", hint=f"name one of its GGUF files: {', '.join(inside)}")
    raise ModelNotFound(f"{directory} has no config.json" if files else f"{directory} is empty")
