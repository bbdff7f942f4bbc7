"""A target that can be trained: whole texts through its layers, with trainable low-rank updates of its matrices.

The inference decoder folds and packs its weights and works in place. This one computes the same from the weights as
stored, with gradients. Dense layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recomputed

from slipstream.errors import OptionError
from slipstream.models.config import ModelConfig
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.layers.rope import inverse_frequencies
from slipstream.models.shapes import weight_names, weight_shapes

TUNED = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer, by canonical names
_PACE = 0.25  # scale of an update, so that the target learns at a quarter of the head's rate
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}

Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [length, head size / 2] each


@dataclass(frozen=True)
class Factors:
    """An update of a matrix [out, in], in two factors: leave [out, rank] times enter [rank, in], times `_PACE`."""

    enter: torch.Tensor
    leave: torch.Tensor

    @property
    def product(self) -> torch.Tensor:
        """The update, in float32."""
        return _PACE * (self.leave.float() @ self.enter.float())


class Update(nn.Module):
    """The trainable factors of one matrix's update; initially they add nothing."""

    def __init__(self, shape: tuple[int, ...], rank: int) -> None:
        super().__init__()
        rows, columns = shape
        self.enter = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.leave = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], to be added to the matrix's own product."""
        return _PACE * functional.linear(functional.linear(x, self.enter.to(x.dtype)), self.leave.to(x.dtype))


class TunedModel(nn.Module):
    """A target with updates of rank `rank` in its last `layers` layers (0: in all).

    Its parameters are the updates alone, named `layers.{i}.{part}.enter` and `.leave`; the target's own weights are
    frozen and not part of its state.
    """

    def __init__(self, source: Checkpoint, dtype: torch.dtype, device: str, *, rank: int, layers: int = 0) -> None:
        super().__init__()
        self.config = source.config
        require_tunable(self.config, source.name)
        shapes, first = weight_shapes(self.config), self.config.layers - (layers or self.config.layers)
        self.layers = nn.ModuleDict()
        self._updates: dict[str, Update] = {}  # the same by canonical name
        for index in range(max(0, first), self.config.layers):
            parts = {part: Update(shapes[f"layers.{index}.{part}"], rank) for part in TUNED}
            self.layers[str(index)] = nn.ModuleDict(parts)
            self._updates |= {f"layers.{index}.{part}": update for part, update in parts.items()}
        self._weights = {name: source.weight(name).to(device, dtype) for name in weight_names(self.config)}
        local = self.config.rope_local_theta or self.config.rope_theta
        unscaled = replace(self.config, rope_theta=local, rope_scaling=None, rope_factors=())
        self._frequencies = [inverse_frequencies(config).to(device) for config in (self.config, unscaled)]

    def read(self, tokens: torch.Tensor, taps: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The residual stream [batch, length, width] after the last layer, and after those requested."""
        x = self._weights["embed"][tokens] * torch.tensor(self.config.embed_scale, dtype=self._weights["embed"].dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = [torch.outer(positions, frequencies) for frequencies in self._frequencies]
        turns = [(angle.cos(), angle.sin()) for angle in angles]
        tapped: dict[int, torch.Tensor] = {}
        for index in range(self.config.layers):
            # Only a layer's input is kept; the rest is recomputed in the backward pass.
            turn = turns[self.config.local_rope(index)]
            x = recomputed(self._layer, index, x, turn, use_reentrant=False, preserve_rng_state=False)
            if index in taps:
                tapped[index] = x
        return x, tapped

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, width] after the last layer -> [rows, vocabulary]; not tuned."""
        output = self._weights["embed" if self.config.tied_head else "head"]
        logits = functional.linear(self._normed(hidden, self._weights["norm"]), output)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _layer(self, index: int, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        """One layer, [batch, length, width] -> the same."""
        config = self.config

        def weight(part: str) -> torch.Tensor:
            return self._weights[f"layers.{index}.{part}"]

        def product(part: str, rows: torch.Tensor) -> torch.Tensor:
            bias = weight(f"{part}_bias") if config.qkv_bias and part in ("q", "k", "v") else None
            result, update = functional.linear(rows, weight(part), bias), self._updates.get(f"layers.{index}.{part}")
            return result if update is None else result + update(rows)

        def closed(part: str, rows: torch.Tensor) -> torch.Tensor:
            return self._normed(rows, weight(part)) if config.post_norms else rows

        rows = self._normed(x, weight("attn_norm"))
        q, k, v = (product(part, rows) for part in ("q", "k", "v"))
        if config.qk_norm:
            q, k = (self._normed_parts(part, weight(name)) for part, name in ((q, "q_norm"), (k, "k_norm")))
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in (q, k, v))
        mixed = self._attended(_turned(q, turns), _turned(k, turns), v, config.window(index))
        x = x + closed("attn_post_norm", product("o", mixed.transpose(1, 2).flatten(2)))
        rows = self._normed(x, weight("mlp_norm"))
        gated = _ACTIVATIONS[config.activation](product("gate", rows)) * product("up", rows)
        return x + closed("mlp_post_norm", product("down", gated))

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        """[batch, heads, length, size] of q, fewer heads of k and v -> the shape of q."""
        config, length = self.config, q.shape[2]
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        line = torch.arange(length, device=q.device)
        back = line[:, None] - line[None, :]
        whole = window is None or window >= length
        seen = (back >= 0) & (back < (window or length))
        cap = config.attention_softcap
        if cap is None:
            mask = None if whole else seen
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
            )
        group = config.group
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = cap * torch.tanh(q.float() @ k.float().transpose(-1, -2) * (scale / cap))
        return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).to(v.dtype) @ v

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.norm_eps)

    def _normed_parts(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A norm over each head, or over all heads together, depending on the weight's length."""
        return self._normed(x.unflatten(-1, (-1, len(weight))), weight).flatten(-2)


def require_tunable(config: ModelConfig, name: str) -> None:
    """Refuse a target with layers that are not supported here."""
    if config.experts or config.qkv_clip is not None:
        what = "experts" if config.experts else "clipped queries, keys and values"
        raise OptionError(f"{name} has {what}, but only dense layers can be tuned", hint="train it without --joint")


def updates_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Factors]:
    """The updates in the state of a TunedModel, by the canonical names of their matrices."""
    names = sorted({name.rpartition(".")[0] for name in tensors})
    return {name: Factors(tensors[f"{name}.enter"], tensors[f"{name}.leave"]) for name in names}


def _turned(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Apply RoPE to [batch, heads, length, size]; dimension i rotates with i + size / 2, as on disk."""
    cosine, sine = turns
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).to(x.dtype)
