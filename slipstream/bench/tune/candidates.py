"""Which settings are worth trying for a model: the available drafters, and tree sizes of the best of them."""

from __future__ import annotations

from slipstream.bench.tree_sizes import sized
from slipstream.drafters import tuned
from slipstream.drafters.composites.merge import MergeOptions
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.registry import DEFAULT, DrafterSpec, parse_speculate
from slipstream.errors import OptionError

_ALWAYS = ("suffix", "ngram", "lookahead")  # need neither training nor a second model
_HEADS = ("eagle3", "mtp", "parallel", "medusa", "kangaroo")
_SIZES = (4, 8, 16, 32)
_FOUND = "layer_skip"  # only after its own search


def methods(fingerprint: str, draft_model: str | None = None) -> list[str]:
    """A setting for each method that this model can use, alone and merged with `suffix`."""
    found = list(_ALWAYS)
    known = trained(fingerprint)
    models = [name for name in _HEADS if name in known]
    models += [f"draft_model:model={draft_model}"] if draft_model is not None else []
    if draft_model is None and head_checkpoint.find("draft_model", fingerprint) is not None:
        models.append("draft_model")
    for name in models:
        found += [name, f"suffix+{name}"]
    return found + ([_FOUND] if tuned.find(_FOUND, fingerprint) is not None else [])


def sizes(setting: str) -> list[str]:
    """The setting with trees of other sizes, as far as its drafter accepts them."""
    return [each for each in _sized(setting) if each != setting]


def limits(setting: str) -> list[str]:
    """`auto` within limits: it picks among the setting's drafters alone, or from smaller trees."""
    spec = parse_speculate(setting)
    options = spec.checked()
    parts = options.drafters if isinstance(options, MergeOptions) else (spec,)
    return [str(DrafterSpec(DEFAULT, {"drafters": parts})), *_sized(DEFAULT)]


def _sized(setting: str) -> list[str]:
    return [each for count in _SIZES if _possible(each := sized(setting, count))]


def _possible(setting: str) -> bool:
    """Whether a drafter accepts these options: some have a least size."""
    try:
        for part in parse_speculate(setting).parts():
            part.checked()
    except OptionError:
        return False
    return True


def trained(fingerprint: str) -> set[str]:
    """The heads that were trained for this model."""
    return {name for name in _HEADS if head_checkpoint.find(name, fingerprint) is not None}
