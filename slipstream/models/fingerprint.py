"""A fingerprint of a model's weights: a drafter trained for one model must not serve another of its shape."""

from __future__ import annotations

import hashlib

import torch

from slipstream.models.config import ModelConfig

_SAMPLES = 16  # elements of every weight
_SHAPE = (
    *("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size"),
    *("experts", "experts_per_token"),
)


class Fingerprint:
    """A digest of a model's shape and of a few elements of each weight.

    The elements are rounded to 8 bits of mantissa, so that a model has the same fingerprint in every dtype.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._digest = hashlib.sha256(repr([getattr(config, fact) for fact in _SHAPE]).encode())

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Add one weight, as it was on disk if possible."""
        numbers = weight.flatten()
        sample = numbers[:: max(1, len(numbers) // _SAMPLES)][:_SAMPLES]
        self._digest.update(name.encode())
        self._digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())

    def __str__(self) -> str:
        return self._digest.hexdigest()[:16]
