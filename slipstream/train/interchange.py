"""Trained drafters to and from other projects: which layouts there are (docs/interchange.md)."""

from __future__ import annotations

from pathlib import Path

from slipstream.drafters import trained
from slipstream.drafters.trained import Made, Trained
from slipstream.errors import OptionError, UnsupportedModel, unknown_choice
from slipstream.models.view import TargetView
from slipstream.train import interchange_draft, interchange_eagle, interchange_medusa
from slipstream.train.foreign import Foreign

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


def require_format(layout: str) -> None:
    """Refuse a format that does not exist."""
    if layout not in FORMATS:
        raise unknown_choice("format", layout, list(FORMATS))


def load_for(layout: str, place: Path) -> Trained:
    """Our checkpoint at `place`; refused where the format does not exist or is for another kind."""
    require_format(layout)
    checkpoint, method = trained.load(place), FORMATS[layout]
    if checkpoint.method != method:
        raise OptionError(f"{place} holds a drafter of kind {checkpoint.method!r}, and {layout} is for {method!r}")
    return checkpoint


def export_drafter(checkpoint: Trained, place: Path, layout: str, target: TargetView) -> Foreign:
    """Our drafter for `target`, which lies at `place`, as other projects keep it."""
    checkpoint.require(FORMATS[layout], target.fingerprint, place)
    if layout == SPECULATORS:
        return interchange_eagle.exported(checkpoint, target)
    if layout == HF_MODEL:
        return interchange_draft.exported(checkpoint, target)
    return interchange_medusa.exported(checkpoint, target.config.context)
