"""The interface between file formats and the decoder: a config, weights by canonical name, a tokenizer.

Canonical names, the same for every file format (all matrices are [out, in], unpermuted, as in Hugging Face, and a
norm's weight is what it multiplies by, whether the file says w or w - 1):

    embed  norm  head                                     head is absent when config.tied_head
    layers.{i}.attn_norm  .q  .k  .v  .o                  .q_bias .k_bias .v_bias when config.qkv_bias
    layers.{i}.q_norm  .k_norm                            when config.qk_norm
    layers.{i}.attn_post_norm  .mlp_post_norm             when config.post_norms
    layers.{i}.mlp_norm  .gate  .up  .down                dense
    layers.{i}.router  .experts.{e}.gate  .up  .down      mixture of experts (config.mixture(i))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from slipstream.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from slipstream.text import Tokenizer


class Checkpoint(Protocol):
    """A model on disk, opened but not read: `weight` reads one tensor at a time."""

    config: ModelConfig
    name: str  # for messages: the path or id that the user gave
    mtp: tuple[str, ...]  # the file's own names of its weights for multi-token prediction, which the decoder ignores

    def weight(self, name: str) -> torch.Tensor:
        """One tensor by canonical name, in the file's dtype (float32 where it had to be computed)."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the model, if any did."""
        ...
