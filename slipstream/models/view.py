"""TargetView: everything that a drafter sees of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.attention import Segment
from slipstream.cache import PagedCache
from slipstream.models.config import ModelConfig
from slipstream.models.model import Model, PassOutput
from slipstream.models.unfold import PlainLayer, plain_layer
from slipstream.sequence import TARGET
from slipstream.text import Tokenizer


class TargetView:
    """Config, fingerprint, embedding, norm, head, and passes over any subset of layers."""

    def __init__(
        self, model: Model, cache: PagedCache, tokenizer: Tokenizer | None, longest: int, reads_draws: bool, exact: bool
    ) -> None:
        self._model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.longest = longest  # tokens that a sequence of this engine may have
        self.reads_draws = reads_draws  # the verifier compares p and q: sampled nodes accept more than chosen ones
        self.exact = exact  # the kernels are batch-invariant
        self.layered = model.layered  # single layers can be run, tapped and skipped
        self.device = model.device
        self.dtype = model.dtype

    @property
    def config(self) -> ModelConfig:
        """The target's shape."""
        return self._model.config

    @property
    def name(self) -> str:
        """The target's name."""
        return self._model.name

    @property
    def fingerprint(self) -> str:
        """The fingerprint that identifies the target of a trained drafter or of a finding."""
        return self._model.fingerprint

    @property
    def cheap_rows(self) -> int:
        """Rows up to which one more row in a target pass costs far less than a pass of its own."""
        return self._model.cheap_rows

    @property
    def expensive_rows(self) -> bool:
        """Whether one more row in a target pass costs a tenth of it."""
        return self._model.expensive_rows

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embedding rows of token ids."""
        return self._model.embed(tokens)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return self._model.norm(hidden)

    def head(self, hidden: torch.Tensor, vocab: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden rows, for the whole vocabulary or for a subset of ids."""
        return self._model.head(hidden, vocab)

    def head_rows(self, vocab: torch.Tensor) -> torch.Tensor:
        """The rows [len(vocab), width] of the output matrix."""
        return self._model.head_rows(vocab)

    @property
    def norm_weight(self) -> torch.Tensor:
        """The weight of the final norm, [width]."""
        return self._model.norm_weight

    def layer(self, index: int) -> PlainLayer | None:
        """The matrices of one layer, for a draft initialised as its copy; None if a layer has more than those."""
        return plain_layer(self._model, index)

    def run(self, segments: Sequence[Segment], layers: Sequence[int]) -> PassOutput:
        """A draft pass over some of the target's layers.

        It may read committed K/V of those layers and writes only the open slots after them, which verification rewrites
        in every layer.
        """
        return self._model.forward(self.cache, TARGET, segments, layers=layers)
