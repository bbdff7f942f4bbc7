"""One decoder layer of a head: for training (whole texts at once) and for drafting (rows over pages)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from slipstream.cache import LayerStore
from slipstream.drafters.heads.head_rows import HeadRows
from slipstream.gpu.fused import gated, rotated, runs_fused
from slipstream.gpu.layer_ops import DeferredNorm
from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import AddingLinear, add_product, make_draft_linear
from slipstream.models.layers.rope import inverse_frequencies
from slipstream.models.native_layers import NativeLayers, dense_gemms
from slipstream.models.native_rows import native_shape
from slipstream.models.unfold import PlainLayer


class HeadLayer(nn.Module):
    """Attention and a gated MLP in the target's shape. The input of q, k and v may be wider than the residual.

    The caller norms its inputs. Heads are laid out with rotated pairs of dimensions side by side.
    """

    def __init__(self, config: ModelConfig, inputs: int, mlp: int | None = None) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        self.config = config
        self.qkv = nn.Linear(inputs, (config.heads + 2 * config.kv_heads) * size, bias=False)
        self.out = nn.Linear(config.heads * size, width, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Linear(width, 2 * (mlp or config.intermediate_size), bias=False)
        self.down = nn.Linear(mlp or config.intermediate_size, width, bias=False)
        self.register_buffer("frequencies", inverse_frequencies(config), persistent=False)

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """Complex factors for q, k and v at positions [length]: q is also scaled, and v is unchanged."""
        config = self.config
        angles = torch.outer(positions.float(), self.get_buffer("frequencies"))
        turns = torch.polar(torch.ones((), device=positions.device), angles)
        alone = torch.ones_like(turns)
        parts = [turns * config.head_dim**-0.5] * config.heads + [turns] * config.kv_heads + [alone] * config.kv_heads
        return torch.cat(parts, 1)

    def project(self, qkv: torch.Tensor, turns: torch.Tensor) -> Projected:
        """The GEMM with `qkv`, [batch, length, width of q, k and v], split into q, k and v."""
        config = self.config
        parts = rotated(qkv, turns).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        return Projected(*parts.split([config.heads, config.kv_heads, config.kv_heads], dim=1))

    def keyed(self, kv: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v from elsewhere, [batch, length, width of both], as attention reads them; `turns`: of k and v."""
        parts = rotated(kv, turns).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        k, v = parts.chunk(2, 1)
        return k, v

    def close(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Attention output [batch, heads, length, size] -> the layer's output [batch, length, width]."""
        x = residual + self.out(mixed.transpose(1, 2).flatten(2))
        normed = functional.rms_norm(x, self.mlp_norm.shape, self.mlp_norm.to(x.dtype), self.config.norm_eps)
        output: torch.Tensor = x + self.down(gated(self.gate_up(normed)))
        return output

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The layer over whole texts, with causal attention."""
        rows = self.project(self.qkv(inputs), self.turns(positions))
        return self.close(rows.attended(), residual)


def begin_as(layer: HeadLayer, source: PlainLayer | None) -> None:
    """Initialise a layer from one of the target's, as far as the shapes agree.

    If the input of q, k and v is wider than that of the target's layer, its last part is what the target's layer reads.
    A narrower MLP takes the target's units with the largest weights.
    """
    if source is None:
        return
    width = source.qkv.shape[1]
    gate, up = source.gate_up.chunk(2)
    units = _strongest(gate, up, source.down, layer.down.weight.shape[1])
    with torch.no_grad():
        for weight, begun in (
            (layer.qkv.weight[:, -width:], source.qkv),
            (layer.out.weight, source.out),
            (layer.gate_up.weight, torch.cat([gate[units], up[units]])),
            (layer.down.weight, source.down[:, units]),
        ):
            if weight.shape == begun.shape:
                weight.copy_(begun)


def _strongest(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, count: int) -> torch.Tensor:
    """The units of an MLP with the largest weights, ascending; all of them if there are no more."""
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    units: torch.Tensor = strength.topk(min(count, len(strength))).indices
    return units.sort().values


def begin_with(linear: nn.Linear, part: int) -> None:
    """Initialise a matrix that joins parts of one width to pass on one part, and little of the others."""
    width = linear.weight.shape[0]
    with torch.no_grad():
        linear.weight.mul_(0.1)
        linear.weight[:, part * width : (part + 1) * width] += torch.eye(width)


@dataclass(frozen=True)
class Projected:
    """q (scaled), k and v of the rows of whole texts."""

    q: torch.Tensor  # [batch, heads, length, size]
    k: torch.Tensor  # [batch, kv heads, length, size]
    v: torch.Tensor

    def attended(self, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Attention output [batch, heads, length, size]: masked by `visible` [length, length], or causal."""
        if visible is None:
            return functional.scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=True, scale=1.0, enable_gqa=True
            )
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (part.repeat_interleave(group, 1) for part in (self.k, self.v))  # needed by the fast kernels with masks
        return functional.scaled_dot_product_attention(self.q, k, v, attn_mask=visible, scale=1.0)


class PagedHeadLayer:
    """A `HeadLayer` over the rows of a pass, with its K/V in the drafter's own store."""

    def __init__(self, layer: HeadLayer, dtype: torch.dtype, device: str) -> None:
        config = layer.config
        self._config = config
        queries = config.heads * config.head_dim
        scale = torch.ones(len(layer.qkv.weight), 1)
        scale[:queries] = config.head_dim**-0.5

        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().to(device, dtype)

        self._qkv = make_draft_linear(ready(layer.qkv.weight.detach().float().cpu() * scale))
        self._out = make_draft_linear(ready(layer.out.weight))
        self._down = make_draft_linear(ready(layer.down.weight))
        self._native_shape = native_shape(config) if device == "cpu" and dtype == torch.float32 else None
        length = config.hidden_size**0.5 if self._native_shape else 1.0  # our own kernels' norm leaves this factor out
        self._gate_up = make_draft_linear(ready(layer.gate_up.weight * layer.mlp_norm * length))
        self._norm = torch.full((config.hidden_size,), 1 / length, dtype=dtype, device=device)
        self.native = self._as_program()

    def _as_program(self) -> NativeLayers | None:
        """The whole layer as one program of our own kernels, if available."""
        shape, parts = self._native_shape, dense_gemms(self._qkv, self._out, self._gate_up, self._down)
        if shape is None or parts is None:
            return None
        return NativeLayers(shape, self._config, [parts], [None], entered=True)

    def __call__(self, inputs: torch.Tensor, residual: torch.Tensor, rows: HeadRows, store: LayerStore) -> torch.Tensor:
        """[rows, inputs] and [rows, width] -> [rows, width]; K/V are written to the rows' slots of `store`."""
        if self.native is not None and rows.native is not None:
            x = residual.clone()
            self.native.run_(x, rows.native, [store], (0,), inputs=inputs)
            return x
        mixed = rows.mix(self._qkv(inputs), store)
        mixed = mixed if mixed.dtype == inputs.dtype else mixed.to(inputs.dtype)
        if isinstance(self._out, AddingLinear) and isinstance(self._gate_up, AddingLinear) and runs_fused(inputs):
            x = self._out.onto(residual, mixed)
            late = DeferredNorm(x, self._config.norm_eps * x.shape[1], x.shape[1] ** 0.5)
            add_product(x, self._down, self._gate_up.gates(late))
            return x
        x = residual + self._out(mixed)
        normed = functional.rms_norm(x, self._norm.shape, self._norm, self._config.norm_eps)
        return x.add_(self._down(gated(self._gate_up(normed))))
