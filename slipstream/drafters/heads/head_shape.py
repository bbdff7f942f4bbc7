"""Heads whose layer has a shape of its own, as many imported heads do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.drafters.heads.head import HeadSettings
from slipstream.models.config import ModelConfig


@dataclass(frozen=True)
class ShapedSettings(HeadSettings):
    """The shape of a head's layer; 0 means the target's. `mlp`: MLP width. `heads`, `kv_heads`, `head_dim`: attention.
    `rope_theta`: base of unscaled rotary positions. `norm_eps`: epsilon of the norms.
    """

    mlp: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 0.0
    norm_eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mlp", "heads", "kv_heads", "head_dim", "rope_theta", "norm_eps"):
            self.require(getattr(self, name) >= 0, name, "0 or more")
        if self.heads and self.kv_heads:
            self.require(self.heads % self.kv_heads == 0, "kv_heads", "a divisor of the heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "even numbers")

    def shaped(self, target: ModelConfig) -> ModelConfig:
        """The target's shape with the layer's own settings."""
        if self.rope_theta:
            target = replace(target, rope_theta=self.rope_theta, rope_scaling=None, rope_factors=())
        return replace(
            target,
            intermediate_size=self.mlp or target.intermediate_size,
            heads=self.heads or target.heads,
            kv_heads=self.kv_heads or target.kv_heads,
            head_dim=self.head_dim or target.head_dim,
            norm_eps=self.norm_eps or target.norm_eps,
        )
