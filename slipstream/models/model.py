"""The interface of a model: `Decoder` runs the families that we implement, `Adapter` all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.attention import Segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.errors import NotEnoughMemory
from slipstream.models.config import ModelConfig
from slipstream.models.memory import available_bytes


@dataclass(frozen=True)
class PassOutput:
    """The result of a pass, segment after segment in input order."""

    logits: torch.Tensor  # [rows with logits, vocab]
    hidden: torch.Tensor  # [rows, width], after the last layer that ran, before the final norm; no rows if not layered
    taps: dict[int, torch.Tensor]  # layer -> [rows, width], the residual stream after that layer


def usual_rows(device: str) -> int:
    """Rows that are cheap in a pass over unquantised weights."""
    return 17 if device == "cpu" else 64


class Model(Protocol):
    """A causal language model whose K and V are in a PagedCache.

    `layered`: single layers can be run, tapped and skipped. Otherwise `layers`, `taps`, `norm` and `head` raise an
    OptionError; only a whole pass is possible.
    """

    config: ModelConfig
    name: str  # for messages: the path or id that the user gave
    dtype: torch.dtype
    device: str
    fingerprint: str  # identifies these weights
    layered: bool = True
    exact: bool = False  # on a GPU: computed by batch-invariant kernels

    @property
    def cheap_rows(self) -> int:
        """Rows up to which one more row costs far less than a pass of its own."""
        return usual_rows(self.device)

    @property
    def expensive_rows(self) -> bool:
        """Whether one more row costs a tenth of a pass, even among few: the pass is not purely memory-bound."""
        return False

    def add_store(self, cache: PagedCache, name: str) -> None:
        """Add a store for this model's K and V to the cache, under `name`."""
        config = self.config
        needed = cache.capacity * PAGE_SIZE * config.kv_bytes_per_token(self.dtype.itemsize)
        if self.device == "cpu":  # existing stores become resident only as they fill
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
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embedding rows of token ids."""
        ...

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        ...

    @property
    def norm_weight(self) -> torch.Tensor:
        """The weight of the final norm, [width]."""
        ...

    def head_rows(self, vocab: torch.Tensor) -> torch.Tensor:
        """The rows [len(vocab), width] of the output matrix."""
        ...

    def head(self, hidden: torch.Tensor, vocab: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden rows [rows, width] (final norm included), for all tokens or for the ids in `vocab`."""
        ...
