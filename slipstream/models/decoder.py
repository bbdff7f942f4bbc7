"""The decoder: one ragged forward pass over whatever rows the sequences of a step bring.

Linear layers see [rows, width]; only attention knows about sequences. There is no `if family == ...`: the config says
what the layers have. Logits are computed only for the rows that need them, hidden states of any layer can be tapped,
and a pass may run any subset of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from slipstream.attention import BlockAttention, Segment
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache
from slipstream.errors import NotEnoughMemory
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.linear import Linear, make_linear
from slipstream.models.memory import available_bytes
from slipstream.models.mlp import MLP, make_mlp
from slipstream.models.rope import RopeTable, pairs_adjacent, rotate_


@dataclass(frozen=True)
class PassOutput:
    """What a pass gives back, segment after segment in the order they came in."""

    logits: torch.Tensor  # [rows that asked, vocab]
    hidden: torch.Tensor  # [rows, width], after the last layer that ran, before the final norm
    taps: dict[int, torch.Tensor]  # layer -> [rows, width], the residual stream after that layer


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; those of its two norms and the scale of q are folded into the matrices behind them."""

    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp: MLP
    window: int | None


class Decoder:
    """A decoder-only transformer with rotary positions, RMS norms and gated MLPs, dense or a mixture of experts."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
        self.config = checkpoint.config
        self.name = checkpoint.name
        self.dtype = dtype
        self.device = device
        self._embed = self._read(checkpoint, "embed")
        head = self._embed if self.config.tied_head else self._read(checkpoint, "head")
        self._head = make_linear(head)
        self._norm = self._read(checkpoint, "norm")
        self.layers = [self._layer(checkpoint, i) for i in range(self.config.layers)]
        self._rope = RopeTable(self.config, device)
        self._eps = torch.tensor((self.config.norm_eps * self.config.hidden_size) ** 0.5, device=device)

    def _read(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        return checkpoint.weight(name).to(device=self.device, dtype=self.dtype)

    def _layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        config = self.config

        def read(name: str) -> torch.Tensor:
            return self._read(checkpoint, f"layers.{index}.{name}")

        def behind_norm(norm: str) -> Callable[[str], torch.Tensor]:
            weight = read(norm).float() * config.hidden_size**0.5  # the factor that `_scaled` leaves out
            return lambda name: (read(name).float() * weight).to(self.dtype)

        q_scale = config.head_dim**-0.5
        folded = 1.0 if config.qk_norm else q_scale  # a norm of q would undo a scale in front of it
        attention = behind_norm("attn_norm")

        def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pairs = [pairs_adjacent(part, config.head_dim) for part in (q * folded, k)]
            return torch.cat([*pairs, v])

        bias = fused(read("q_bias"), read("k_bias"), read("v_bias")) if config.qkv_bias else None
        return Layer(
            qkv=make_linear(fused(attention("q"), attention("k"), attention("v")), bias),
            q_norm=pairs_adjacent(read("q_norm") * q_scale, config.head_dim) if config.qk_norm else None,
            k_norm=pairs_adjacent(read("k_norm"), config.head_dim) if config.qk_norm else None,
            out=make_linear(read("o")),
            mlp=make_mlp(config, read, behind_norm("mlp_norm")),
            window=config.window(index),
        )

    def add_store(self, cache: PagedCache, name: str) -> None:
        """Make room in the cache for this model's K and V under `name`."""
        config = self.config
        needed = cache.capacity * PAGE_SIZE * config.kv_bytes_per_token(self.dtype.itemsize)
        if self.device == "cpu":  # stores that are there already become resident only as they fill
            needed += sum(data.nbytes for data in cache.stores.values())
        if needed > (free := available_bytes(self.device)):
            raise NotEnoughMemory(
                f"the K/V of {self.name} need {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free",
                hint="lower max_model_len or cache_tokens",
            )
        cache.add_store(name, config.layers, 2, config.kv_heads, config.head_dim, self.dtype)

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
        rows = Rows(segments, self.device)
        attention = BlockAttention(segments, config.heads, config.kv_heads, config.head_dim, self.device)
        turns = self._rope.at(rows.positions, rows.highest).repeat(1, config.heads + config.kv_heads)
        turns = functional.pad(turns, (0, config.kv_heads * config.head_dim // 2), value=1.0)  # v does not turn
        data = cache.layers(store)
        tapped: dict[int, torch.Tensor] = {}
        x = self._embed[rows.tokens]
        for index in range(config.layers) if layers is None else layers:
            layer = self.layers[index]
            q, kv = self._qkv(layer, x, turns)
            rows.write(data[index], kv)
            mixed = attention(q, data[index], layer.window)
            x.add_(layer.out(mixed if mixed.dtype == self.dtype else mixed.to(self.dtype)))
            x.add_(layer.mlp(self._scaled(x)))
            if index in taps:
                tapped[index] = x.clone()
        wanted = x if rows.wanted is None else x[rows.wanted]
        return PassOutput(self.head(wanted), x, tapped)

    def _qkv(self, layer: Layer, x: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [rows, heads * size], and k and v as [2, kv heads, rows, size]."""
        config = self.config
        size, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        qkv = layer.qkv(self._scaled(x))
        rows, width = qkv.shape
        if layer.q_norm is not None and layer.k_norm is not None:
            by_head = qkv.view(rows, -1, size)
            by_head[:, :heads] = self._normed(by_head[:, :heads], layer.q_norm)
            by_head[:, heads : heads + kv_heads] = self._normed(by_head[:, heads : heads + kv_heads], layer.k_norm)
        rotate_(qkv, turns)
        kv = qkv.as_strided((2, kv_heads, rows, size), (kv_heads * size, size, width, 1), heads * size)
        return qkv.narrow(1, 0, heads * size), kv

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """A norm whose weight, and the square root of the width, are folded into what follows.

        sqrt(mean(x^2) + eps) is, up to that root, the hypotenuse of the length of x and a constant: one operation.
        """
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scaled = x / torch.hypot(length, self._eps)
        return scaled if scaled.dtype == self.dtype else scaled.to(self.dtype)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embedding rows of token ids."""
        return self._embed[tokens]

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return self._normed(hidden, self._norm)

    def head(self, hidden: torch.Tensor, vocab: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden rows [rows, width] (final norm included), for all tokens or for the ids in `vocab`."""
        if not len(hidden):
            return hidden.new_zeros(0, self.config.vocab_size if vocab is None else len(vocab))
        normed = self.norm(hidden)
        if vocab is None:
            return self._head(normed)
        if self.config.tied_head:
            return functional.linear(normed, self._embed[vocab])
        return self._head(normed)[:, vocab]  # an untied head is kept in packed form only


class Rows:
    """The rows of a pass, flattened: tokens, positions, where K/V go, which logits are wanted."""

    def __init__(self, segments: Sequence[Segment], device: str) -> None:
        positions = _joined([s.positions for s in segments])
        slots = _joined([s.slots for s in segments])
        pages = _joined([np.asarray(s.table.pages)[s.slots // PAGE_SIZE] for s in segments])
        self.highest = int(positions.max())
        self.tokens = torch.tensor([token for s in segments for token in s.tokens], device=device)
        self.positions = torch.from_numpy(positions).to(device)
        # Rows of one sequence that lie in one page, as in every step of a lone answer, are written by a plain copy.
        self._one_page = int(pages[0]) if len(segments) == 1 and pages[0] == pages[-1] else None
        self._first = int(slots[0]) % PAGE_SIZE
        if self._one_page is None:
            self._pages = torch.from_numpy(pages).to(device)
            self._slots = torch.from_numpy(slots % PAGE_SIZE).to(device)
        self.wanted: torch.Tensor | None = None
        if any(s.logits_from for s in segments):
            wanted = _joined([np.arange(s.rows) >= s.logits_from for s in segments])
            self.wanted = torch.from_numpy(np.flatnonzero(wanted)).to(device)

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Put k and v [2, kv heads, rows, size] into one layer."""
        if self._one_page is not None:
            layer.page(self._one_page).narrow(2, self._first, kv.shape[2]).copy_(kv)
        else:
            layer.both[:, self._pages, :, self._slots] = kv.permute(2, 0, 1, 3)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
