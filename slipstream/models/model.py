"""What the engine needs of a model: `Decoder` runs the families that we compute ourselves, `Adapter` all others."""

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
    """What a pass gives back, segment after segment in the order they came in."""

    logits: torch.Tensor  # [rows that asked, vocab]
    hidden: torch.Tensor  # [rows, width], after the last layer that ran, before the final norm; no rows if not layered
    taps: dict[int, torch.Tensor]  # layer -> [rows, width], the residual stream after that layer


class Model(Protocol):
    """A causal language model whose K and V live in a PagedCache.

    `layered`: single layers can be run, tapped and left out. Where they cannot, `layers`, `taps`, `norm` and `head` are
    refused with an OptionError; a whole pass is all there is.
    """

    config: ModelConfig
    name: str  # for messages: the path or id that the user gave
    dtype: torch.dtype
    device: str
    fingerprint: str  # tells these weights from all others
    layered: bool = True
    exact: bool = False  # on a GPU: computed by kernels in which a row does not depend on the others

    @property
    def cheap_rows(self) -> int:
        """Rows up to which one more in a pass costs far less than a pass of its own."""
        return 17 if self.device == "cpu" else 64

    @property
    def dear_rows(self) -> bool:
        """Whether one row more costs a tenth of a pass, even among few: multiplying counts, and not reading alone."""
        return False

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
