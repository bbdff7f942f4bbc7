"""What `slipstream check` finds out about a trained drafter without loading its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.folders import expanded

if TYPE_CHECKING:
    import torch

    from slipstream.drafters import DrafterSpec
    from slipstream.models.config import ModelConfig


@dataclass(frozen=True)
class TrainedHead:
    """A trained drafter. Without a `checkpoint` it is found by the target's weights, which are not read here."""

    method: str
    checkpoint: str | None
    trained_for: str | None = None
    draft_tokens: int = 0
    weights: int = 0  # bytes
    per_token: int = 0  # bytes, for every token of context
    problem: str | None = None

    def describe(self) -> str:
        """In a line."""
        if self.checkpoint is None:
            return f"{self.method}: found, or not, when the model is loaded; its memory is not counted here"
        return f"{self.method} for {self.trained_for}, {self.draft_tokens:,} draft tokens"


def examine_head(spec: DrafterSpec, config: ModelConfig, dtype: torch.dtype) -> TrainedHead | None:
    """The head that a drafter runs, if it runs one."""
    import torch

    from slipstream.drafters import drafter_class, trained
    from slipstream.drafters.head import Frame
    from slipstream.drafters.learned import LearnedDrafter, kept_per_token, unfilled_head
    from slipstream.errors import SlipstreamError

    kind, place = drafter_class(spec.method), getattr(spec.checked(), "checkpoint", None)
    if not issubclass(kind, LearnedDrafter) or place is None:
        return None
    if not place:
        return TrainedHead(spec.method, None)
    try:
        found = trained.load(expanded(place))
        found.require_shape(spec.method, config, Path(place))
        rows = torch.zeros(len(found.vocab), config.hidden_size)
        nothing = Frame(config, found.vocab, rows, torch.ones(config.hidden_size), lambda ids: rows[:0], lambda _: None)
        kept = kept_per_token(unfilled_head(kind, found.settings, nothing))
    except SlipstreamError as error:
        return TrainedHead(spec.method, place, problem=error.message)
    numbers = sum(weight.numel() for weight in found.weights.values())
    borrowed = 0 if "rows" in found.weights else rows.numel()
    return TrainedHead(
        method=spec.method,
        checkpoint=place,
        trained_for=found.target.name,
        draft_tokens=len(found.vocab),
        weights=(numbers + borrowed) * dtype.itemsize,
        per_token=kept * dtype.itemsize,
    )
