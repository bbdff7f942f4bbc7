"""The decoder: one ragged forward pass over the rows of all sequences of a step.

Linear layers see [rows, width]; only attention knows about sequences. There is no `if family == ...`: the config says
what the layers have. Logits are computed only for the rows that need them, hidden states of any layer can be tapped,
and a pass may run any subset of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from slipstream import attention
from slipstream.attention import Attention, Segment, Tiles, attention_over, paged_available
from slipstream.attention.even import soft_cap
from slipstream.cache import LayerStore, PagedCache
from slipstream.gpu.fused import runs_fused
from slipstream.gpu.layer_ops import DeferredNorm, RowPlacement, normed, rotate_and_store
from slipstream.models.captured import CapturedPasses
from slipstream.models.config import ModelConfig
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.kept_weights import WeightsFile
from slipstream.models.layers.gpu_mixture import GroupedMixture
from slipstream.models.layers.linear import (
    Linear,
    add_product,
    has_int8_dot,
    has_matrix_unit,
    int8_kernels_work,
    native_works,
    short_vectors,
)
from slipstream.models.layers.mlp import MLP, AfterNorm, DenseMLP, make_mlp
from slipstream.models.layers.norm import PostNorm, UnitNorm
from slipstream.models.layers.rope import RopeTable, make_ropes, pairs_adjacent, rotate_, turns_of_all_heads
from slipstream.models.model import Model, PassOutput
from slipstream.models.native_rows import NativeRows, native_shape
from slipstream.models.rows import PlacedRows, Rows, tokens_of, wanted_rows
from slipstream.models.weights import Weights, joined

if TYPE_CHECKING:
    from slipstream.models.native_layers import NativeLayers


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; those of its two norms and the scale of q are folded into the matrices after them.

    Quantised matrices keep the norms' weights separately.
    """

    qkv: Linear
    deferred_bias: torch.Tensor | None  # of qkv, if `defers_norm`: it is added after the norm
    q_norm: torch.Tensor | None  # [head size], or [heads * head size] for a norm over all heads together
    k_norm: torch.Tensor | None
    limits: tuple[torch.Tensor, torch.Tensor] | None  # least and greatest elements of q, k and v, [width of qkv] each
    rope: int  # index of the layer's RopeTable
    out: Linear | PostNorm
    mlp: MLP
    window: int | None
    defers_norm: bool  # on a GPU: the GEMM qkv takes unnormalised rows, and the norm is applied after it


class _Rotations:
    """The rotations of the rows of a pass."""

    def __init__(self, rope: RopeTable, rows: PlacedRows, config: ModelConfig) -> None:
        self.table = rope.up_to(rows.highest)  # of all positions, complex [positions, head size / 2]
        self.positions = rows.positions
        self._config = config

    @cached_property
    def all_heads(self) -> torch.Tensor:
        """For q and k of all heads, identity for v: [rows, width of qkv / 2]."""
        return turns_of_all_heads(self.table[self.positions], self._config)


class Decoder(Model):
    """A decoder-only transformer with rotary positions, RMS norms and gated MLPs, dense or a mixture of experts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        quantize: str = "none",
        *,
        exact: bool = False,
        weights_file: WeightsFile | None = None,
    ) -> None:
        """`exact`: batch-invariant kernels on a GPU too; elsewhere it changes nothing.

        `weights_file`: the file that caches the quantised weights.
        """
        self.quantize = quantize  # format of the weights: none (that of `dtype`), int8 or int4
        self.exact = exact and device != "cpu"
        self.config = checkpoint.config
        self.name = checkpoint.name
        self.dtype = dtype
        self.device = device
        self._paged = paged_available(device)
        self._captured: WeakKeyDictionary[PagedCache, CapturedPasses] = WeakKeyDictionary()
        # In float16, products of unnormalised rows could overflow.
        self._defers_norm = self._paged and quantize == "none" and dtype != torch.float16
        self._grouped = self._paged and quantize == "none" and self.config.activation == "silu"  # experts, if any
        weights = Weights(checkpoint, dtype, device, quantize, exact=self.exact, weights_file=weights_file)
        self._embed, self._head = weights.tables()
        self._norm = weights.read("norm")
        self._scaled = UnitNorm(self.config, dtype, device)
        self._final_norm_weight = self._norm * self.config.hidden_size**0.5  # what `_scaled` leaves out
        self.layers = [self._layer(weights, i) for i in range(self.config.layers)]
        self._ropes = make_ropes(self.config, device)
        self.native = self._as_programs()
        scale = self.config.embed_scale
        self._embed_scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)
        self.fingerprint = weights.all_made()

    def _layer(self, weights: Weights, index: int) -> Layer:
        config = self.config

        def read(name: str) -> torch.Tensor:
            return weights.read(f"layers.{index}.{name}")

        def norm_weight(name: str) -> torch.Tensor:
            left_out: float = config.hidden_size**0.5  # by `_scaled`
            return read(name).float() * left_out

        def after_norm(norm: str) -> AfterNorm:
            weight = norm_weight(norm)
            if self.quantize != "none":
                return AfterNorm(read, weight)
            return AfterNorm(lambda name: (read(name).float() * weight).to(self.dtype), None)

        q_scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        if config.attention_softcap is not None:
            q_scale /= config.attention_softcap
        folded = 1.0 if config.qk_norm else q_scale  # a norm of q would undo a scale before it
        entering = after_norm("attn_norm")

        def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if not q.is_meta:
                q, k = (pairs_adjacent(part, config.head_dim) for part in (q * folded, k))
            return joined(q, k, v)

        bias = fused(read("q_bias"), read("k_bias"), read("v_bias")) if config.qkv_bias else None
        limits = None
        if config.qkv_clip is not None:
            sizes = torch.tensor([config.heads, 2 * config.kv_heads]) * config.head_dim
            limit = torch.tensor([q_scale, 1.0]).repeat_interleave(sizes) * config.qkv_clip
            limits = (-limit.to(self.device, self.dtype), limit.to(self.device, self.dtype))
        out: Linear | PostNorm = weights.linear(read("o"))
        mlp = make_mlp(config, config.mixture(index), read, after_norm("mlp_norm"), weights.linear, self._grouped)
        if config.post_norms:
            out = PostNorm(out, self._scaled, norm_weight("attn_post_norm").to(self.dtype))
            mlp = PostNorm(mlp, self._scaled, norm_weight("mlp_post_norm").to(self.dtype))
        qkv = fused(*map(entering.read, "qkv"))
        defers_norm = self._defers_norm and limits is None and not config.qk_norm
        return Layer(
            qkv=weights.linear(qkv, None if defers_norm else bias, entering.columns),
            deferred_bias=bias if defers_norm else None,
            q_norm=pairs_adjacent(read("q_norm") * q_scale, config.head_dim) if config.qk_norm else None,
            k_norm=pairs_adjacent(read("k_norm"), config.head_dim) if config.qk_norm else None,
            limits=limits,
            rope=int(config.local_rope(index)),
            out=out,
            mlp=mlp,
            window=config.window(index),
            defers_norm=defers_norm,
        )

    def _as_programs(self) -> NativeLayers | None:
        """The layers as programs of our own kernels, if available."""
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
        """The attention of one pass: our own kernel on a CPU, if there is one for these layers."""
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
        """The forward pass by our own kernels."""
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

        Tensors only: with a capturing attention, and if `captures`, there is no host synchronisation.
        """
        config = self.config
        turns = [_Rotations(rope, rows, config) for rope in self._ropes]
        tapped: dict[int, torch.Tensor] = {}
        deferred = DeferredNorm(x, *self._scaled.deferred)
        stream = self._scaled.stream(x)
        x = stream.rows
        for index in layers:
            layer = self.layers[index]
            if layer.defers_norm and rows.places is not None:
                qkv = layer.qkv(x)
                placement = RowPlacement(turns[layer.rope].table, rows.positions, *rows.places)
                rotate_and_store(qkv, placement, data[index].both, config.heads, deferred, layer.deferred_bias)
            else:
                qkv, kv = self._qkv(layer, stream.normed(), turns[layer.rope].all_heads)
                rows.write(data[index], kv)
            mixed = attend(qkv, data[index], layer.window)
            add_product(x, layer.out, mixed if mixed.dtype == self.dtype else mixed.to(self.dtype))
            if self._defers_norm and isinstance(layer.mlp, DenseMLP) and layer.mlp.defers_norm:
                layer.mlp.onto_(x, deferred)
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
        """Rows up to which one more row costs far less than a pass of its own."""
        if self.device != "cpu" or self.quantize == "none":
            return super().cheap_rows
        if int8_kernels_work():  # reading takes so little time that compute matters
            few = 8 if has_matrix_unit() else 7
            return few if self.quantize == "int8" else 6 if has_int8_dot() else 4
        return 4 if self.quantize == "int4" else super().cheap_rows  # that kernel unpacks weights for every few rows

    @property
    def expensive_rows(self) -> bool:
        """Whether one more row costs a tenth of a pass, even among few: the pass is not purely memory-bound."""
        return self.device == "cpu" and self.quantize == "none" and self.dtype == torch.float32 and short_vectors()

    @property
    def captures(self) -> bool:
        """Whether `run_` can be captured: not if the host chooses experts, or which blocks are read."""
        return self._paged and (self.config.experts == 0 or self._grouped)

    def attention_over(self, tiles: Tiles) -> Attention:
        """Attention over tiles that were set up before, in fixed buffers."""
        config = self.config
        shape = config.heads, config.kv_heads, config.head_dim
        return attention.over_tiles(tiles, *shape, self.device, config.attention_softcap, exact=self.exact)

    def compile_kernels(self, cache: PagedCache, store: str) -> None:
        """Compile the attention of every shape of pass, so that no request waits for it."""
        if self._paged and not self.exact:  # exact kernels have one shape
            from slipstream.attention.paged import compile_kernels

            config, layers = self.config, cache.layers(store)
            for index in {layer.window: number for number, layer in enumerate(self.layers)}.values():
                shape = config.heads, config.kv_heads, config.head_dim, config.attention_softcap
                compile_kernels(*shape, layers[index], self.layers[index].window)

    def _enter(
        self, cache: PagedCache, store: str, segments: Sequence[Segment], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """The input of the first layer that rows have not been through yet, and the number of that layer."""
        done = max((s.prepared.layers for s in segments if s.prepared is not None), default=0)
        if not done:
            return self.embed(tokens), 0
        unprepared = [replace(s, logits_from=s.rows) for s in segments if s.prepared is None]
        caught_up: Iterator[torch.Tensor] = iter(())
        if unprepared:
            hidden = self.forward(cache, store, unprepared, layers=range(done)).hidden
            caught_up = iter(hidden.split([s.rows for s in unprepared]))
        return torch.cat([next(caught_up) if s.prepared is None else s.prepared.hidden for s in segments]), done

    def _qkv(self, layer: Layer, normed: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v [rows, (heads + 2 * kv heads) * size], and of these k and v as [2, kv heads, rows, size]."""
        config = self.config
        size, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        qkv = layer.qkv(normed)
        if layer.deferred_bias is not None:
            qkv += layer.deferred_bias
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
        """Embedding rows of token ids, as the first layer's input."""
        rows = self._embed[tokens]
        return rows if self._embed_scale is None else rows * self._embed_scale

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        if runs_fused(hidden) or hidden.dtype != torch.float32:
            return normed((hidden,), (self._norm,), self.config.norm_eps)
        return self._scaled(hidden).mul_(self._final_norm_weight)

    @property
    def norm_weight(self) -> torch.Tensor:
        """The weight of the final norm, [width]."""
        return self._norm

    def head_rows(self, vocab: torch.Tensor) -> torch.Tensor:
        """The rows [len(vocab), width] of the output matrix."""
        if self.config.tied_head:
            return self._embed[vocab]
        one = torch.eye(self.config.hidden_size, dtype=self.dtype, device=self.device)
        return self._head(one)[:, vocab].T  # only the packed form is kept: unpack it by a GEMM

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
            logits = self._head(normed)[:, vocab]  # of an untied head only the packed form is kept
        cap = self.config.logit_softcap
        return logits if cap is None else soft_cap(logits, cap)
