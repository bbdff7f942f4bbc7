"""What `slipstream check` reports about a trained drafter without loading its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import OptionError, SlipstreamError
from slipstream.folders import expanded

if TYPE_CHECKING:
    import torch

    from slipstream.drafters import DrafterSpec
    from slipstream.models.config import ModelConfig


@dataclass(frozen=True)
class TrainedHead:
    """A trained drafter. Weights are not read here, so one that belongs to the target is found by its shape."""

    method: str
    checkpoint: str | None
    by_shape: bool = False
    trained_for: str | None = None
    draft_tokens: int = 0
    weights: int = 0  # bytes
    per_token: int = 0  # bytes, for every token of context
    problem: str | None = None

    def describe(self) -> str:
        """One line."""
        if self.trained_for is None:
            return f"{self.method} of another project, converted when it is loaded; its memory is not counted here"
        doubt = " (found by shape: whether it fits these weights is known after loading)"
        made = f"{self.method} for {self.trained_for}, {self.draft_tokens:,} draft tokens"
        return made + (doubt if self.by_shape else "")


def examine_head(spec: DrafterSpec, config: ModelConfig, dtype: torch.dtype) -> TrainedHead | None:
    """The head that a drafter runs, if any."""
    import torch

    from slipstream.drafters import drafter_class
    from slipstream.drafters.heads import head_checkpoint
    from slipstream.drafters.heads.head import Frame
    from slipstream.drafters.heads.head_drafter import HeadDrafter, kept_per_token, unfilled_head
    from slipstream.drafters.interchange import is_foreign

    kind, place = drafter_class(spec.method), getattr(spec.checked(), "checkpoint", None)
    if not issubclass(kind, HeadDrafter) or place is None:
        return None
    if place and is_foreign(place):
        return TrainedHead(spec.method, place)
    by_shape = not place
    try:
        place = place or _by_shape(spec.method, config)
        found = head_checkpoint.load(expanded(place))
        found.require_shape(spec.method, config, Path(place))
        rows = torch.zeros(len(found.vocab), config.hidden_size)
        nothing = Frame(config, found.vocab, rows, torch.ones(config.hidden_size), lambda ids: rows[:0], lambda _: None)
        kept = kept_per_token(unfilled_head(kind, found.settings, nothing))
    except SlipstreamError as error:
        return TrainedHead(spec.method, place or None, by_shape, problem=str(error))
    numbers = sum(weight.numel() for weight in found.weights.values())
    borrowed = 0 if "rows" in found.weights else rows.numel()
    return TrainedHead(
        method=spec.method,
        checkpoint=place,
        by_shape=by_shape,
        trained_for=found.target.name,
        draft_tokens=len(found.vocab),
        weights=(numbers + borrowed) * dtype.itemsize,
        per_token=kept * dtype.itemsize,
    )


def available_head(spec: DrafterSpec, config: ModelConfig, dtype: torch.dtype) -> TrainedHead | None:
    """The head that `auto` picks from although no option named it: loaded if there is one, and memory for it."""
    from slipstream.drafters.composites.auto import HEADS, AutoOptions
    from slipstream.drafters.heads import head_checkpoint
    from slipstream.drafters.registry import DrafterSpec

    unnamed = (part.checked() for part in spec.parts())
    if not any(isinstance(options, AutoOptions) and not options.drafters for options in unnamed):
        return None
    method = next((name for name in HEADS if head_checkpoint.of_shape(name, config)), None)
    found = None if method is None else examine_head(DrafterSpec(method), config, dtype)
    return found if found is not None and found.problem is None else None


def _by_shape(method: str, config: ModelConfig) -> str:
    from slipstream.drafters.heads import head_checkpoint
    from slipstream.models.formats.adapter_checkpoint import AdapterConfig

    if isinstance(config, AdapterConfig):
        raise OptionError(f"{method} reads hidden states, and a model run by transformers does not expose them")
    places = head_checkpoint.of_shape(method, config)
    if not places:
        cure = f"slipstream train {method} -m MODEL"
        raise OptionError(f"no {method} drafter has been trained for a target of this shape", hint=cure)
    return str(places[0])
