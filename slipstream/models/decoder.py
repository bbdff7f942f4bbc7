"""The decoder: one ragged forward pass over whatever rows the sequences of a step bring.

Linear layers see [rows, width]; only attention knows about sequences. There is no `if family == ...`: the config says
what the layers have. Logits are computed only for the rows that need them, hidden states of any layer can be tapped,
and a pass may run any subset of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from slipstream import attention
from slipstream.attention import Attention, Segment, Tiles, attention_over, paged_available
from slipstream.attention.even import soft_cap
from slipstream.cache import LayerStore, PagedCache
from slipstream.fused import runs_fused
from slipstream.models.captured import CapturedPasses
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config import ModelConfig
from slipstream.models.exact_linear import ExactLinear
from slipstream.models.fingerprint import Fingerprint
from slipstream.models.gpu_mixture import GroupedMixture
from slipstream.models.linear import (
    Linear,
    add_product,
    digits_work,
    dots_work,
    make_linear,
    native_works,
    short_vectors,
    squares_work,
)
from slipstream.models.mlp import MLP, BehindNorm, DenseMLP, make_mlp
from slipstream.models.model import Model, PassOutput
from slipstream.models.native_rows import NativeRows, native_shape
from slipstream.models.norm import PostNorm, UnitNorm
from slipstream.models.quantized import Int8Matrix, int8_linear, int8_table, quantized_linear
from slipstream.models.rope import RopeTable, make_ropes, pairs_adjacent, rotate_, turns_of_all_heads
from slipstream.models.rows import PlacedRows, Rows, tokens_of, wanted_rows
from slipstream.passing import Late, Turned, normed, turn_and_keep

if TYPE_CHECKING:
    from slipstream.models.native_layers import NativeLayers


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; those of its two norms and the scale of q are folded into the matrices behind them.

    Quantised matrices have the norms' weights beside them instead.
    """

    qkv: Linear
    late_bias: torch.Tensor | None  # of qkv, where `scales_late`: what is added behind the norm is not the product's
    q_norm: torch.Tensor | None  # [head size], or [heads * head size] for a norm over all heads together
    k_norm: torch.Tensor | None
    limits: tuple[torch.Tensor, torch.Tensor] | None  # least and greatest elements of q, k and v, [width of qkv] each
    rope: int  # which of the model's rotations
    out: Linear | PostNorm
    mlp: MLP
    window: int | None
    scales_late: bool  # on a GPU: rows go into the product with qkv as they are, and the norm is applied behind it


class _Turns:
    """The rotations of the rows of a pass."""

    def __init__(self, rope: RopeTable, rows: PlacedRows, config: ModelConfig) -> None:
        self.table = rope.up_to(rows.highest)  # of all positions, complex [positions, head size / 2]
        self.positions = rows.positions
        self._config = config

    @cached_property
    def all_heads(self) -> torch.Tensor:
        """For q and k of all heads, and none for v: [rows, width of qkv / 2]."""
        return turns_of_all_heads(self.table[self.positions], self._config)


class Table(Protocol):
    """Something that gives rows for ids."""

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor: ...


class Decoder(Model):
    """A decoder-only transformer with rotary positions, RMS norms and gated MLPs, dense or a mixture of experts."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: str, quantize: str = "none", *, exact: bool = False
    ) -> None:
        """`exact`: let no row depend on the others on a GPU either; elsewhere it says nothing new."""
        self.quantize = quantize  # what the weights are kept in: none (as `dtype` says), int8 or int4
        self.exact = exact and device != "cpu"
        self.config = checkpoint.config
        self.name = checkpoint.name
        self.dtype = dtype
        self.device = device
        self._paged = paged_available(device)
        self._captured: WeakKeyDictionary[PagedCache, CapturedPasses] = WeakKeyDictionary()
        # In float16 the products of rows that have no norm could overflow.
        self._scales_late = self._paged and quantize == "none" and dtype != torch.float16
        self._grouped = self._paged and quantize == "none" and self.config.activation == "silu"  # experts, if any
        self._marks = Fingerprint(self.config)
        self._embed, self._head = self._tables(checkpoint)
        self._norm = self._read(checkpoint, "norm")
        self._scaled = UnitNorm(self.config, dtype, device)
        self._norm_behind = self._norm * self.config.hidden_size**0.5  # what `_scaled` leaves out
        self.layers = [self._layer(checkpoint, i) for i in range(self.config.layers)]
        self._ropes = make_ropes(self.config, device)
        self.native = self._as_programs()
        scale = self.config.embed_scale
        self._embed_scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)
        self.fingerprint = str(self._marks)

    def _read(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        weight = checkpoint.weight(name)
        self._marks.add(name, weight)
        return weight.to(device=self.device, dtype=self.dtype)

    def _tables(self, checkpoint: Checkpoint) -> tuple[Table, Linear]:
        """The embedding table and the output product. Where the layers have 4 bits these have 8, which they need."""
        embed, tied = self._read(checkpoint, "embed"), self.config.tied_head
        if self.quantize == "none":
            return embed, self._linear(embed if tied else self._read(checkpoint, "head"))
        if tied:
            return int8_table(embed)
        table = Int8Matrix(embed)
        del embed  # one matrix at a time is wide
        return table, int8_linear(self._read(checkpoint, "head"))

    def _linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> Linear:
        if self.exact:
            return ExactLinear(weight, bias)
        if self.quantize == "none":
            return make_linear(weight, bias)  # `behind_norm` has folded the columns in
        return quantized_linear(self.quantize, weight, bias, columns)

    def _layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        config = self.config

        def read(name: str) -> torch.Tensor:
            return self._read(checkpoint, f"layers.{index}.{name}")

        def norm_weight(name: str) -> torch.Tensor:
            left_out: float = config.hidden_size**0.5  # by `_scaled`
            return read(name).float() * left_out

        def behind_norm(norm: str) -> BehindNorm:
            weight = norm_weight(norm)
            if self.quantize != "none":
                return BehindNorm(read, weight)
            return BehindNorm(lambda name: (read(name).float() * weight).to(self.dtype), None)

        q_scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        if config.attention_softcap is not None:
            q_scale /= config.attention_softcap
        folded = 1.0 if config.qk_norm else q_scale  # a norm of q would undo a scale in front of it
        entering = behind_norm("attn_norm")

        def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pairs = [pairs_adjacent(part, config.head_dim) for part in (q * folded, k)]
            return torch.cat([*pairs, v])

        bias = fused(read("q_bias"), read("k_bias"), read("v_bias")) if config.qkv_bias else None
        limits = None
        if config.qkv_clip is not None:
            sizes = torch.tensor([config.heads, 2 * config.kv_heads]) * config.head_dim
            limit = torch.tensor([q_scale, 1.0]).repeat_interleave(sizes) * config.qkv_clip
            limits = (-limit.to(self.device, self.dtype), limit.to(self.device, self.dtype))
        out: Linear | PostNorm = self._linear(read("o"))
        mlp = make_mlp(config, config.mixture(index), read, behind_norm("mlp_norm"), self._linear, self._grouped)
        if config.post_norms:
            out = PostNorm(out, self._scaled, norm_weight("attn_post_norm").to(self.dtype))
            mlp = PostNorm(mlp, self._scaled, norm_weight("mlp_post_norm").to(self.dtype))
        qkv = fused(*map(entering.read, "qkv"))
        scales_late = self._scales_late and limits is None and not config.qk_norm
        return Layer(
            qkv=self._linear(qkv, None if scales_late else bias, entering.columns),
            late_bias=bias if scales_late else None,
            q_norm=pairs_adjacent(read("q_norm") * q_scale, config.head_dim) if config.qk_norm else None,
            k_norm=pairs_adjacent(read("k_norm"), config.head_dim) if config.qk_norm else None,
            limits=limits,
            rope=int(config.local_rope(index)),
            out=out,
            mlp=mlp,
            window=config.window(index),
            scales_late=scales_late,
        )

    def _as_programs(self) -> NativeLayers | None:
        """The layers as programs of our own kernels, where those can be had."""
        if self.device != "cpu" or self.dtype != torch.float32 or not native_works():
            return None
        from slipstream.models.native_layers import native_layers

        return native_layers(self.config, self.layers, self._ropes)

    def forward(
        self,
        cache: PagedCache,
        store: str,
        segments: Sequence[Segment],
        *,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> PassOutput:
        """Run all rows of all segments through the layers (all of them by default), writing K/V into `store`."""
        config = self.config
        if self.captures and layers is None and CapturedPasses.takes(segments):
            if cache not in self._captured:
                self._captured[cache] = CapturedPasses(self)
            return self._captured[cache].run(cache, store, segments, taps)
        if self.native is not None:
            return self._run_natively(self.native, cache, store, segments, layers, taps)
        rows = Rows(segments, self.device)
        attend = self._attention(segments)
        x, done = self._enter(cache, store, segments, rows.tokens)
        entered = {done - 1: x.clone()} if done - 1 in taps else {}
        which = range(done, config.layers) if layers is None else layers
        tapped = entered | self.run_(x, rows, attend, cache.layers(store), which, taps)
        wanted = x if rows.wanted is None else x[rows.wanted]
        return PassOutput(self.head(wanted), x, tapped)

    def _attention(self, segments: Sequence[Segment]) -> Attention:
        """That of one pass: by a kernel of our own on a CPU, if there is one for such layers."""
        config = self.config
        native = native_shape(config) if self.device == "cpu" and self.dtype == torch.float32 else None
        if native is not None:
            return NativeRows(segments, native, self._ropes[0]).attend
        shape = config.heads, config.kv_heads, config.head_dim
        return attention_over(segments, *shape, self.device, config.attention_softcap, exact=self.exact)

    def _run_natively(
        self,
        native: NativeLayers,
        cache: PagedCache,
        store: str,
        segments: Sequence[Segment],
        layers: Sequence[int] | None,
        taps: Sequence[int],
    ) -> PassOutput:
        """The same by our own kernels."""
        x, done = self._enter(cache, store, segments, tokens_of(segments, self.device))
        entered = {done - 1: x.clone()} if done - 1 in taps else {}
        which = range(done, self.config.layers) if layers is None else layers
        rows = native.rows(segments, self._ropes[0])
        tapped = entered | native.run_(x, rows, cache.layers(store), which, taps)
        wanted = wanted_rows(segments, self.device)
        return PassOutput(self.head(x if wanted is None else x[wanted]), x, tapped)

    def run_(
        self,
        x: torch.Tensor,
        rows: PlacedRows,
        attend: Attention,
        data: Sequence[LayerStore],
        layers: Sequence[int],
        taps: Sequence[int] = (),
    ) -> dict[int, torch.Tensor]:
        """Run hidden states [rows, width] through layers, in place; returns copies of the tapped ones.

        Tensors alone: with a capturing attention, and where `captures` says so, nothing is asked of the host.
        """
        config = self.config
        turns = [_Turns(rope, rows, config) for rope in self._ropes]
        tapped: dict[int, torch.Tensor] = {}
        late = Late(x, *self._scaled.late)
        stream = self._scaled.stream(x)
        x = stream.rows
        for index in layers:
            layer = self.layers[index]
            if layer.scales_late and rows.places is not None:
                qkv = layer.qkv(x)
                turned = Turned(turns[layer.rope].table, rows.positions, *rows.places)
                turn_and_keep(qkv, turned, data[index].both, config.heads, late, layer.late_bias)
            else:
                qkv, kv = self._qkv(layer, stream.normed(), turns[layer.rope].all_heads)
                rows.write(data[index], kv)
            mixed = attend(qkv, data[index], layer.window)
            add_product(x, layer.out, mixed if mixed.dtype == self.dtype else mixed.to(self.dtype))
            if self._scales_late and isinstance(layer.mlp, DenseMLP) and layer.mlp.scales_late:
                layer.mlp.onto_(x, late)
            elif isinstance(layer.mlp, GroupedMixture):
                layer.mlp.onto_(x, stream.normed())
            else:
                x.add_(layer.mlp(stream.normed()))
            if index in taps:
                tapped[index] = x.clone()
        stream.end()
        return tapped

    @property
    def cheap_rows(self) -> int:
        """Rows up to which one more in a pass costs far less than a pass of its own."""
        if self.device != "cpu" or self.quantize == "none":
            return super().cheap_rows
        if digits_work():  # reading so few bytes takes so little time that multiplying counts
            few = 8 if squares_work() else 7
            return few if self.quantize == "int8" else 6 if dots_work() else 4
        return 4 if self.quantize == "int4" else super().cheap_rows  # that kernel unpacks weights for every few rows

    @property
    def dear_rows(self) -> bool:
        """Whether one row more costs a tenth of a pass, even among few: multiplying counts, and not reading alone."""
        return self.device == "cpu" and self.quantize == "none" and self.dtype == torch.float32 and short_vectors()

    @property
    def captures(self) -> bool:
        """Whether `run_` can be recorded as a graph: not where the host chooses experts, or what blocks are read."""
        return self._paged and (self.config.experts == 0 or self._grouped)

    def attention_over(self, tiles: Tiles) -> Attention:
        """Attention for rows that were laid out before, in buffers that stay where they are."""
        config = self.config
        shape = config.heads, config.kv_heads, config.head_dim
        return attention.over_tiles(tiles, *shape, self.device, config.attention_softcap, exact=self.exact)

    def _enter(
        self, cache: PagedCache, store: str, segments: Sequence[Segment], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """What goes into the first layer that all rows have yet to run, and the number of that layer."""
        done = max((s.prepared.layers for s in segments if s.prepared is not None), default=0)
        if not done:
            return self.embed(tokens), 0
        behind = [replace(s, logits_from=s.rows) for s in segments if s.prepared is None]
        caught_up: Iterator[torch.Tensor] = iter(())
        if behind:
            hidden = self.forward(cache, store, behind, layers=range(done)).hidden
            caught_up = iter(hidden.split([s.rows for s in behind]))
        return torch.cat([next(caught_up) if s.prepared is None else s.prepared.hidden for s in segments]), done

    def _qkv(self, layer: Layer, normed: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v [rows, (heads + 2 * kv heads) * size], and of these k and v as [2, kv heads, rows, size]."""
        config = self.config
        size, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        qkv = layer.qkv(normed)
        if layer.late_bias is not None:
            qkv += layer.late_bias
        rows, width = qkv.shape
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, weight in (
                (qkv.narrow(1, 0, heads * size), layer.q_norm),
                (qkv.narrow(1, heads * size, kv_heads * size), layer.k_norm),
            ):
                groups = part.unflatten(1, (-1, len(weight)))  # a head each, or all heads in one
                groups.copy_(self._normed(groups, weight))
        if layer.limits is not None:
            qkv.clamp_(*layer.limits)
        rotate_(qkv, turns)
        kv = qkv.as_strided((2, kv_heads, rows, size), (kv_heads * size, size, width, 1), heads * size)
        return qkv, kv

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embedding rows of token ids, as the first layer gets them."""
        rows = self._embed[tokens]
        return rows if self._embed_scale is None else rows * self._embed_scale

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        if runs_fused(hidden) or hidden.dtype != torch.float32:
            return normed((hidden,), (self._norm,), self.config.norm_eps)
        return self._scaled(hidden).mul_(self._norm_behind)

    @property
    def norm_weight(self) -> torch.Tensor:
        """The weight of the final norm, [width]."""
        return self._norm

    def head_rows(self, vocab: torch.Tensor) -> torch.Tensor:
        """The rows [len(vocab), width] of the output matrix."""
        if self.config.tied_head:
            return self._embed[vocab]
        one = torch.eye(self.config.hidden_size, dtype=self.dtype, device=self.device)
        return self._head(one)[:, vocab].T  # kept in packed form only, but a product with 1 gives it back

    def head(self, hidden: torch.Tensor, vocab: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden rows [rows, width] (final norm included), for all tokens or for the ids in `vocab`."""
        if not len(hidden):
            return hidden.new_zeros(0, self.config.vocab_size if vocab is None else len(vocab))
        normed = self.norm(hidden)
        if vocab is None:
            logits = self._head(normed)
        elif self.config.tied_head:
            logits = functional.linear(normed, self._embed[vocab])
        else:
            logits = self._head(normed)[:, vocab]  # an untied head is kept in packed form only
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)
