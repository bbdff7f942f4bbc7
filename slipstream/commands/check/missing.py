"""What `slipstream check` reports about models that are not on this machine: nothing is downloaded without --fetch."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.commands.shared.terminal import mebibytes, print_json, say, show_pairs
from slipstream.folders import cache_directory, expanded
from slipstream.models.formats import builtin, hub

if TYPE_CHECKING:
    from slipstream.drafters import DrafterSpec


@dataclass(frozen=True)
class Missing:
    """A model that would have to be downloaded, and what is known about it."""

    model: str
    source: str
    licence: str | None = None  # None: unknown
    download_bytes: int | None = None
    file_bytes: int | None = None

    @property
    def problem(self) -> str:
        """Why its memory is unknown."""
        return f"{self.model} is not here, so its memory is unknown; --fetch downloads it, and so does running it"

    def describe(self) -> str:
        """One line."""
        if self.download_bytes is None or self.file_bytes is None:
            return f"not here; on {self.source}, size unknown"
        sizes = f"{mebibytes(self.download_bytes)} to download, {mebibytes(self.file_bytes)} on disk"
        return f"not here; {sizes} ({self.source}, {self.licence})"


def missing_models(model: str, spec: DrafterSpec) -> list[Missing]:
    """The target and the drafters' models that are not on this machine."""
    named = dict.fromkeys(name for name in (model, *(part.model for part in spec.parts())) if name is not None)
    return [found for name in named if (found := _missing(name)) is not None]


def _missing(name: str) -> Missing | None:
    if name in builtin.MODELS:
        known = builtin.MODELS[name]
        if (cache_directory() / known.filename).exists():
            return None
        return Missing(name, known.source, known.licence, known.wheel_size, known.size)
    if expanded(name).exists() or name.startswith((".", "/", "~")) or not hub.is_reference(name) or _cached(name):
        return None  # here, or not downloadable
    return Missing(name, "the hub")


def _cached(name: str) -> bool:
    """Whether the hub's cache has a model."""
    from huggingface_hub import snapshot_download

    wanted = hub.parse(name)
    try:  # no patterns: any folder of the repository, even if incomplete
        folder = Path(
            snapshot_download(wanted.repository, revision=wanted.revision, local_files_only=True, allow_patterns=[])
        )
    except Exception:  # whatever the client raises
        return False
    if wanted.quant is not None:
        return any(wanted.quant.lower() in file.name.lower() for file in folder.rglob("*.gguf"))
    return (folder / (wanted.file or "config.json")).exists()


def tell_missing(missing: list[Missing], *, as_json: bool) -> None:
    """Print what is known."""
    if as_json:
        entries = [asdict(model) for model in missing]
        problems: dict[str, Any] = {"problems": [model.problem for model in missing]}
        print_json({"missing": entries, "fits": None, **problems, "ok": False}, indent=2)
        return
    show_pairs([*((model.model, model.describe()) for model in missing), ("free disk", mebibytes(_free()))])
    for model in missing:
        say(f"unknown: {model.problem}", "bad")


def _free() -> int:
    """Free bytes on the disk of our cache, which may not exist yet."""
    folder = cache_directory().absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
