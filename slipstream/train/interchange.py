"""Trained drafters to and from other projects: which layouts there are (docs/interchange.md)."""

from __future__ import annotations

from pathlib import Path

from slipstream.drafters import trained
from slipstream.drafters.trained import Made, Trained
from slipstream.errors import OptionError, UnsupportedModel, unknown_choice
from slipstream.models.view import TargetView
from slipstream.train import interchange_draft, interchange_eagle, interchange_medusa
from slipstream.train.foreign import Foreign
from slipstream.train.run import learned_methods

SPECULATORS, VLLM_MEDUSA, HF_MODEL = "speculators", "vllm-medusa", "hf-model"
# format -> the method whose drafters it holds
FORMATS = {
    SPECULATORS: interchange_eagle.METHOD,
    VLLM_MEDUSA: interchange_medusa.METHOD,
    HF_MODEL: interchange_draft.METHOD,
}


def import_drafter(foreign: Foreign, target: TargetView, name: str) -> Trained:
    """The drafter of another project as a checkpoint of ours for `target`, which is called `name`."""
    config = target.config
    made = Made(target.fingerprint, name, config.vocab_size, config.hidden_size, config.layers)
    if interchange_eagle.recognises(foreign):
        return interchange_eagle.imported(foreign, target, made)
    if interchange_medusa.recognises(foreign):
        return interchange_medusa.imported(foreign, made)
    raise UnsupportedModel(
        f"{foreign.name} is no drafter that we know: its first weight is {min(foreign.weights, default='none')!r}",
        hint="known are EAGLE-3 heads (SafeAILab, speculators) and Medusa heads (published, vLLM)",
    )


def named_for(layout: str, given: str) -> Path | None:
    """The directory of a checkpoint that goes into a format; None for the target's own of that kind.

    What does not fit is refused, before anybody has waited for a target.
    """
    _require_format(layout)
    place = trained.named(given, learned_methods())
    if place is not None:
        load_for(layout, place)
    elif given != FORMATS[layout]:
        raise OptionError(f"{layout} is for {FORMATS[layout]}, and {given} has no such format", hint=_which())
    return place


def load_for(layout: str, place: Path) -> Trained:
    """Our checkpoint at `place`; refused where the format does not exist or is for another kind."""
    _require_format(layout)
    checkpoint, method = trained.load(place), FORMATS[layout]
    if checkpoint.method != method:
        raise OptionError(f"{place} holds a drafter of kind {checkpoint.method!r}, and {layout} is for {method!r}")
    return checkpoint


def export_drafter(checkpoint: Trained, place: Path, layout: str, target: TargetView) -> Foreign:
    """Our drafter for `target`, which lies at `place`, as other projects keep it."""
    checkpoint.require(FORMATS[layout], target.fingerprint, place)
    if layout == SPECULATORS:
        return interchange_eagle.exported(checkpoint, target, place)
    if layout == HF_MODEL:
        return interchange_draft.exported(checkpoint, target, place)
    return interchange_medusa.exported(checkpoint, target.config.context)


def _require_format(layout: str) -> None:
    if layout not in FORMATS:
        raise unknown_choice("format", layout, list(FORMATS))


def _which() -> str:
    return "formats: " + ", ".join(f"{layout} for {method}" for layout, method in FORMATS.items())
