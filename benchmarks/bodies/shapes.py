"""The sizes that bodies come in, and whether a small model fits into one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.errors import OptionError
from slipstream.models.config import ModelConfig

CODES = 64  # dimensions of random token codes: an MoE's experts are chosen by them
SIGNALS = CODES + 1  # the last dimensions of a body's hidden states: the codes, and a constant one

# Features that a body cannot have, by the names of ModelConfig: each must have its default value.
_REFUSED = (
    *("qkv_bias", "qkv_clip", "qk_norm", "query_scale", "attention_softcap", "rope_local_theta"),
    *("post_norms", "embed_scale", "logit_softcap", "experts"),
)


@dataclass(frozen=True)
class BodyShape:
    """The size of a body; names as in ModelConfig. An MoE's `intermediate_size` is that of its drafters' MLPs."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0

    def around(self, small: ModelConfig, name: str) -> ModelConfig:
        """The config of a body of this size around a small model; OptionError if it does not fit."""
        self._require(small, name)
        order = layer_order(small.layers, self.layers)
        windows = tuple(None if layer is None else small.window(layer) for layer in order)
        finer = self.head_dim // small.head_dim  # the small model has every `finer`-th frequency
        return replace(
            small,
            **vars(self),
            rope_factors=tuple(factor for factor in small.rope_factors for _ in range(finer)),
            norm_eps=small.norm_eps * small.hidden_size / self.hidden_size,
            windows=windows if small.windows else (),
            tied_head=False,  # the rows of extra tokens are no embeddings
            norm_topk=True,  # all experts have the same output, so their shares must sum to 1
            mtp_layers=0,
        )

    def _require(self, small: ModelConfig, name: str) -> None:
        for fact in _REFUSED:
            if (found := getattr(small, fact)) != getattr(ModelConfig, fact):
                raise OptionError(f"{name} has {fact}={found}, which a body cannot have", hint="a plain Llama fits")
        least = {"hidden_size": small.hidden_size + SIGNALS}
        least |= {fact: getattr(small, fact) for fact in ("layers", "kv_heads", "intermediate_size", "vocab_size")}
        if self.experts:
            least["expert_size"] = small.intermediate_size
        for fact, needed in least.items():
            if (found := getattr(self, fact)) < needed:
                raise OptionError(f"{name} does not fit into a body of {fact}={found}", hint=f"valid: {needed} or more")
        group = small.heads // small.kv_heads
        if self.heads % self.kv_heads or self.heads // self.kv_heads < group:
            raise OptionError(
                f"{name} does not fit into a body of heads={self.heads}, kv_heads={self.kv_heads}",
                hint=f"valid: {group} or more query heads for each KV head",
            )
        if self.head_dim % small.head_dim:
            raise OptionError(
                f"{name} does not fit into a body of head_dim={self.head_dim}",
                hint=f"valid: multiples of {small.head_dim}",
            )


SHAPES = {
    "8b": BodyShape(4096, 32, 32, 8, 128, 14_336, 128_256),
    "1.5b": BodyShape(1536, 30, 12, 3, 128, 8192, 151_936),
    "moe": BodyShape(4096, 32, 32, 8, 128, 14_336, 128_256, experts=8, experts_per_token=2, expert_size=7168),
}


def layer_order(small: int, big: int) -> tuple[int | None, ...]:
    """Which of the small model's layers each layer of a body is; None: an idle one, which adds nothing.

    Heads that read low, middle and high layers find them by a rule of the number of layers. Idle layers are placed so
    that, by that rule, a body's layers give the hidden states that the small model's gave.
    """
    order: list[int | None] = []
    done, idle = 0, big - small
    for layer, place in [*zip(_tapped(small), _tapped(big), strict=False), (small - 1, big - 1)]:
        order += range(done, layer + 1)
        done = layer + 1
        waiting = max(0, min(idle, place + 1 - len(order)))
        order += [None] * waiting
        idle -= waiting
    return tuple(order)


def _tapped(layers: int) -> list[int]:
    return sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)})
