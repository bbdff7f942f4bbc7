"""Exporting trained drafters to the layouts of other projects (docs/interchange.md)."""

from __future__ import annotations

from pathlib import Path

from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.drafters.interchange import eagle, medusa
from slipstream.drafters.interchange.foreign import Foreign
from slipstream.errors import OptionError, unknown_choice
from slipstream.models.view import TargetView
from slipstream.train.interchange import draft
from slipstream.train.run import learned_methods

SPECULATORS, SGLANG_EAGLE3, VLLM_MEDUSA, HF_MODEL = "speculators", "sglang-eagle3", "vllm-medusa", "hf-model"
# format -> the method whose drafters it holds
FORMATS = {
    SPECULATORS: eagle.METHOD,
    SGLANG_EAGLE3: eagle.METHOD,
    VLLM_MEDUSA: medusa.METHOD,
    HF_MODEL: draft.METHOD,
}


def named_for(layout: str, given: str) -> Path | None:
    """The directory of a checkpoint to export to a format; None for the target's own of that kind.

    Mismatches are refused before the target is loaded.
    """
    _require_format(layout)
    place = head_checkpoint.named(given, learned_methods())
    if place is not None:
        load_for(layout, place)
    elif given != FORMATS[layout]:
        raise OptionError(f"{layout} is for {FORMATS[layout]}; {given} has no such format", hint=_which())
    return place


def load_for(layout: str, place: Path) -> Trained:
    """Our checkpoint at `place`; refused if the format does not exist or is for another kind."""
    _require_format(layout)
    checkpoint, method = head_checkpoint.load(place), FORMATS[layout]
    if checkpoint.method != method:
        raise OptionError(f"{place} holds a drafter of kind {checkpoint.method!r}, but {layout} is for {method!r}")
    return checkpoint


def export_drafter(checkpoint: Trained, place: Path, layout: str, target: TargetView) -> Foreign:
    """Our drafter for `target`, stored at `place`, in the layout of another project."""
    checkpoint.require(FORMATS[layout], target.fingerprint, place)
    if layout == SPECULATORS:
        return eagle.exported(checkpoint, target, place)
    if layout == SGLANG_EAGLE3:
        return eagle.exported_flat(checkpoint, target, place)
    if layout == HF_MODEL:
        return draft.exported(checkpoint, target, place)
    return medusa.exported(checkpoint, target.config.context)


def _require_format(layout: str) -> None:
    if layout not in FORMATS:
        raise unknown_choice("format", layout, list(FORMATS))


def _which() -> str:
    return "formats: " + ", ".join(f"{layout} for {method}" for layout, method in FORMATS.items())
