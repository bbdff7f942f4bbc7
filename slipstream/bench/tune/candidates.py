"""Which settings are worth trying for a model: the available drafters, and tree sizes of the best of them."""

from __future__ import annotations

from slipstream.drafters import tuned
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.registry import parse_speculate
from slipstream.errors import OptionError

_ALWAYS = ("suffix", "ngram", "lookahead")  # need neither training nor a second model
_HEADS = ("eagle3", "mtp", "parallel", "medusa", "kangaroo")
_SIZES = (4, 8, 16, 32)
_FOUND = "layer_skip"  # only after its own search


def methods(fingerprint: str, draft_model: str | None = None) -> list[str]:
    """A setting for each method that this model can use, alone and merged with `suffix`."""
    found = list(_ALWAYS)
    models = [name for name in _HEADS if head_checkpoint.find(name, fingerprint) is not None]
    models += [f"draft_model:model={draft_model}"] if draft_model is not None else []
    if draft_model is None and head_checkpoint.find("draft_model", fingerprint) is not None:
        models.append("draft_model")
    for name in models:
        found += [name, f"suffix+{name}"]
    return found + ([_FOUND] if tuned.find(_FOUND, fingerprint) is not None else [])


def sizes(setting: str) -> list[str]:
    """The setting with other tree sizes, as far as its drafter accepts them."""
    if "nodes=" in setting:
        return []
    joint = "," if ":" in setting.rpartition("+")[2] else ":"
    return [sized for count in _SIZES if _possible(sized := f"{setting}{joint}nodes={count}")]


def _possible(setting: str) -> bool:
    """Whether a drafter accepts these options: some have a least size."""
    try:
        for part in parse_speculate(setting).parts():
            part.checked()
    except OptionError:
        return False
    return True


def untrained(fingerprint: str) -> bool:
    """Whether no head was trained for this model."""
    return all(head_checkpoint.find(name, fingerprint) is None for name in _HEADS)
