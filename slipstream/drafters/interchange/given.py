"""A trained drafter as a user gives it: a directory of ours or of another project, or a hub id of either.

A drafter of another project is converted to a checkpoint in the cache folder, keyed by its files' contents and its
target, and found there at the next start.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import DESCRIPTION, VERSION, Made, Trained
from slipstream.drafters.interchange import eagle, medusa
from slipstream.drafters.interchange.foreign import CONFIG, Foreign, read_foreign, weight_files
from slipstream.errors import CorruptFile, ModelNotFound, OptionError, UnsupportedModel
from slipstream.folders import cache_directory, expanded
from slipstream.models.formats import hub
from slipstream.models.view import TargetView

_FILES, _PICKLED = [CONFIG, DESCRIPTION, "*.safetensors"], ["*.bin", "*.pt"]


def import_drafter(foreign: Foreign, target: TargetView, name: str) -> Trained:
    """The drafter of another project as a checkpoint of ours for `target`, whose name is `name`."""
    config = target.config
    made = Made(target.fingerprint, name, config.vocab_size, config.hidden_size, config.layers)
    if eagle.recognises(foreign):
        return eagle.imported(foreign, target, made)
    if medusa.recognises(foreign):
        return medusa.imported(foreign, made)
    raise UnsupportedModel(
        f"{foreign.name} is not a known drafter: its first weight is {min(foreign.weights, default='none')!r}",
        hint="known are EAGLE-3 heads (SafeAILab, speculators) and Medusa heads (published, vLLM)",
    )


def checkpoint_of(given: str, method: str, target: TargetView) -> Path:
    """The directory of our checkpoint for a method and a target that `given` is or is converted to."""
    place = _place(given)
    if (place / DESCRIPTION).exists():
        return place
    kept = cache_directory() / "drafters" / f"imported-{_digest(place, f'{VERSION} {method} {target.fingerprint}')}"
    if not (kept / DESCRIPTION).exists():
        checkpoint = import_drafter(replace(read_foreign(place), name=given), target, target.name)
        if checkpoint.method != method:
            raise OptionError(f"{given} holds a drafter of kind {checkpoint.method!r}, not {method!r}")
        try:
            head_checkpoint.save(kept, checkpoint)
        except OSError as error:
            raise OptionError(f"cannot keep {given} as {str(kept)!r}: {error.strerror or error}") from None
    return kept


def is_foreign(given: str) -> bool:
    """Whether `given` is recognised by its layout, or fetched, once the target is loaded."""
    place = expanded(given)
    return not (place / DESCRIPTION).exists() and bool(weight_files(place) or _on_hub(given, place))


def _place(given: str) -> Path:
    """The directory with a drafter's files."""
    place = expanded(given)
    if _on_hub(given, place):
        folder = hub.fetch(given, _FILES)
        return folder if weight_files(folder) else hub.fetch(given, _PICKLED)
    if (place / DESCRIPTION).exists() or weight_files(place):
        return place
    raise ModelNotFound(
        f"{place} holds no trained drafter",
        hint=f"it would have a {DESCRIPTION}, or the weights of an EAGLE-3 or Medusa head of another project",
    )


def _on_hub(given: str, place: Path) -> bool:
    """Whether it can only be the hub id of a repository; a path starts like one."""
    if place.exists() or given.startswith((".", "/", "~")) or not hub.is_reference(given):
        return False
    reference = hub.parse(given)
    return reference.file is None and reference.quant is None


def _digest(place: Path, purpose: str) -> str:
    """Identifies the files of this drafter and their purpose."""
    whole = hashlib.sha256(purpose.encode())
    try:
        for file in [*weight_files(place), *place.glob(CONFIG)]:
            with file.open("rb") as content:
                whole.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    except OSError as error:
        raise CorruptFile(f"{place} cannot be read: {error.strerror or error}") from None
    return whole.hexdigest()[:32]
