"""The trained part of a drafter, in training and in drafting.

A *head* is a small trained module around a frozen target. It shares the target's embedding and, for a reduced
vocabulary, rows of the target's output matrix, so a checkpoint holds only what was trained.

Row i of a lesson belongs to token x_i at position i. The target's hidden states there are known after x_i has passed
through it, and its distribution there is that of x_(i+1). A head that drafts after the root x_n knows the hidden states
up to x_(n-1), and x_n itself, which was chosen but has not passed through the target yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from slipstream.checks import Checked
from slipstream.gpu.fused import cross_entropy
from slipstream.models.config import ModelConfig
from slipstream.models.unfold import PlainLayer

_WHOLE = 256  # rows


@dataclass(frozen=True)
class HeadSettings(Checked):
    """The shape of a head, fixed when its training starts. `vocabulary`: number of tokens that it can draft, the most
    frequent of its training text (0: all).
    """

    vocabulary: int = 8192

    def __post_init__(self) -> None:
        self.require(self.vocabulary >= 0, "vocabulary", "0 or more")


@dataclass(frozen=True)
class Frame:
    """What a head shares with its target: frozen, and never part of a checkpoint."""

    config: ModelConfig
    vocab: torch.Tensor  # [draft tokens], the target's ids in ascending order
    rows: torch.Tensor  # [draft tokens, width], their rows of the target's output matrix
    norm: torch.Tensor  # [width], the weight of the target's final norm
    embed: Callable[[torch.Tensor], torch.Tensor]  # token ids -> [..., width]
    layer: Callable[[int], PlainLayer | None]  # a layer's matrices, for initialisation; None: another architecture


@dataclass(frozen=True)
class Rows:
    """Rows of a batch, padded with the first one to a number that a GPU has seen before."""

    places: torch.Tensor  # [rows], in [batch * length]
    real: torch.Tensor  # [rows], bool: not padding

    @classmethod
    def of(cls, places: torch.Tensor) -> Rows:
        """These rows, padded."""
        filled = torch.cat([places, places[:1].expand(whole(len(places)) - len(places))])
        return cls(filled, torch.arange(len(filled), device=places.device) < len(places))

    def to(self, device: torch.device | str) -> Rows:
        """These rows on a device, without synchronisation."""
        return Rows(*(part.to(device, non_blocking=True) for part in (self.places, self.real)))


@dataclass(frozen=True)
class Lesson:
    """A batch to learn from: texts written by the target, and its outputs while reading them.

    Texts are padded on the right to one length; `learn` is False there and wherever the next token is not the target's
    own.
    """

    tokens: torch.Tensor  # [batch, length]
    learn: torch.Tensor  # [batch, length], bool: learn the target's distribution at this row
    taps: dict[int, torch.Tensor]  # layer -> [batch, length, width]: the residual stream after that layer
    probabilities: torch.Tensor  # [batch, length, draft tokens]: the target's, of the next token; the sum is 1 or less
    best: torch.Tensor  # [batch, length]: index of its first choice among the draft tokens; -1: not among them
    reread: Callable[[torch.Tensor], torch.Tensor] | None = None  # other texts of the same shape -> their probabilities

    known_rows: Rows | None = None  # `rows`, if known without synchronising the device

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows to learn from, as indices into [batch * length], padded with the first row."""
        return self._rows.places

    @cached_property
    def _rows(self) -> Rows:
        return self.known_rows or Rows.of(self.learn.flatten().nonzero()[:, 0])

    def at(self, x: torch.Tensor, before: int = 0) -> torch.Tensor:
        """Of [batch, length, ...], the rows to learn from, or those `before` rows earlier; [rows, ...]."""
        return x.flatten(0, 1).index_select(0, (self.rows - before).clamp_min(0))

    def counting(self, before: int = 0) -> torch.Tensor:
        """Mask of `rows` as 1 and 0: no padding, and at least `before` rows of the same text before them."""
        return (self._rows.real & (self.rows % self.tokens.shape[1] >= before)).float()


@dataclass(frozen=True)
class Losses:
    """`total` is minimised; the rest is shown. Depth 0 is the first drafted token."""

    total: torch.Tensor
    accuracy: torch.Tensor  # [depths]: how often the head's first choice is the target's, given the true tokens before


class Head(nn.Module, ABC):
    """The trained part of a drafter."""

    taps: tuple[int, ...]  # layers of the target whose output it reads
    also_kept: int = 0  # numbers kept per token of context, besides K/V and hidden states
    tables: tuple[str, ...] = ()  # matrices that do not map states: their rows are tokens, positions or heads
    by_token: tuple[str, ...] = ()  # those with one row per draft token, or several such blocks
    top_is_enough: bool = False  # it needs only the likeliest tokens of each row of the target's distribution
    growing: tuple[str, ...] = ("vocabulary",)  # settings that may be larger than those of the head it continues

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame  # not a parameter: it is the target's

    def begin(self) -> None:
        """Initialise from the target where that beats random initialisation; called once, before the training."""

    def continue_from(self, weights: Mapping[str, torch.Tensor], vocab: torch.Tensor) -> None:
        """Load the weights of a head with the draft tokens `vocab`, all of them among its own.

        Rows of new tokens stay as they are.
        """
        known = torch.searchsorted(self.frame.vocab.cpu(), vocab.cpu())
        state = self.state_dict()
        for name, weight in weights.items():
            if name in self.by_token:
                state[name].unflatten(0, (-1, len(self.frame.vocab)))[:, known] = weight.unflatten(0, (-1, len(vocab)))
            else:
                state[name] = weight
        self.load_state_dict(state)

    def matrices(self) -> list[nn.Parameter]:
        """Parameters that map states to states."""
        return [weight for name, weight in self.named_parameters() if weight.ndim == 2 and name not in self.tables]

    def stored_matrices(self) -> list[nn.Parameter]:
        """Parameters that are stored quantized."""
        return [weight for weight in self.parameters() if weight.ndim == 2]

    @abstractmethod
    def losses(self, lesson: Lesson) -> Losses:
        """The losses of this head on the lesson."""

    def facts(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        """What drafting needs to know about the trained head, from held-out text: saved with its figures."""
        return {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width], already normed -> [..., draft tokens], by the target's own rows."""
        return nn.functional.linear(hidden, self.frame.rows.to(hidden.dtype))

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The target's kind of norm."""
        return nn.functional.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), self.frame.config.norm_eps)


def distance(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of rows of logits [rows, draft tokens] against the target's probabilities, [rows].

    Probability that the target gives to tokens outside the draft vocabulary is left out: the head cannot change it.
    """
    return cross_entropy(logits, probabilities)


def hits(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """1 where the first choice of a row is the target's, else 0."""
    return (logits.argmax(-1) == best).float()


def whole(count: int) -> int:
    """A padded number of rows, one of a few distinct numbers."""
    return -(-count // _WHOLE) * _WHOLE


def mean(values: torch.Tensor, counting: torch.Tensor) -> torch.Tensor:
    """The mean of the values that count; 0 if none do."""
    return (values * counting).sum() / counting.sum().clamp_min(1.0)
