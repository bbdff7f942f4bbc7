"""Draw: the distribution that a sampled node of a tree was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import DraftFault


@dataclass(frozen=True)
class Draw:
    """The distribution of a sampled node: `q` over the whole vocabulary, shared by all children of one node.

    `q` is a one-dimensional float tensor that sums to 1: the distribution that was sampled from, after every
    transformation. Siblings are drawn from it without replacement.
    """

    q: Any

    def check(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Raise DraftFault unless q is a distribution over the vocabulary from which these tokens can be drawn."""
        q = self.q
        dense = type(q) is torch.Tensor and q.layout == torch.strided and q.is_floating_point()
        if not dense or tuple(q.shape) != (vocab_size,):
            raise DraftFault(f"a q is no dense float tensor over the {vocab_size} tokens of the vocabulary")
        least, total, drawn = torch.stack([q.min(), q.sum(), q[tokens].min()]).tolist()  # one copy from a GPU
        if not (least >= 0.0 and abs(total - 1.0) < 1e-5):  # NaN fails too
            raise DraftFault(f"a q is no distribution: it sums to {total}, and its least probability is {least}")
        if not drawn > 0.0:
            raise DraftFault(f"one of the tokens {list(tokens)} was drawn from a q in which it has no probability")
