"""What a drafter that learns is made of, when it is trained and when it drafts.

A *head* is the part that is trained: a small module around a frozen target. It borrows the target's embedding and, for
a reduced vocabulary, the rows of the target's own output matrix, so that a checkpoint holds only what was learnt.

Where is what: row i of a lesson belongs to token x_i at position i. The target's hidden states there are known once x_i
has been through it, and its distribution there is that of x_(i+1). A head that drafts behind the root x_n knows the
hidden states up to x_(n-1), and x_n itself, which was chosen but has not been through the target yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from slipstream.errors import OptionError
from slipstream.fused import cross_entropy
from slipstream.models.config import ModelConfig
from slipstream.models.unfold import PlainLayer

_WHOLE = 256  # rows


@dataclass(frozen=True)
class HeadSettings:
    """The shape of a head, fixed when its training begins. `vocabulary`: tokens that it can draft, the most frequent
    of its training text (0: all).
    """

    vocabulary: int = 8192

    def __post_init__(self) -> None:
        self.require(self.vocabulary >= 0, "vocabulary", "0 or more")

    def require(self, ok: bool, name: str, valid: str) -> None:
        """Refuse a setting that is out of range."""
        if not ok:
            raise OptionError(f"{name}={getattr(self, name)!r} is out of range", hint=f"valid: {valid}")


@dataclass(frozen=True)
class Frame:
    """What a head borrows of its target: frozen, and never part of a checkpoint."""

    config: ModelConfig
    vocab: torch.Tensor  # [draft tokens], the target's ids in ascending order
    rows: torch.Tensor  # [draft tokens, width], their rows of the target's output matrix
    norm: torch.Tensor  # [width], the weight of the target's final norm
    embed: Callable[[torch.Tensor], torch.Tensor]  # token ids -> [..., width]
    layer: Callable[[int], PlainLayer | None]  # a layer's matrices, to begin with; None where it is of another kind


@dataclass(frozen=True)
class Rows:
    """Rows of a batch, filled up with the first one to a number that a GPU has seen before."""

    places: torch.Tensor  # [rows], in [batch * length]
    real: torch.Tensor  # [rows], bool: not there to fill up

    @classmethod
    def of(cls, places: torch.Tensor) -> Rows:
        """These, filled up."""
        filled = torch.cat([places, places[:1].expand(whole(len(places)) - len(places))])
        return cls(filled, torch.arange(len(filled), device=places.device) < len(places))

    def to(self, device: torch.device | str) -> Rows:
        """The same on a device, which is not waited for."""
        return Rows(*(part.to(device, non_blocking=True) for part in (self.places, self.real)))


@dataclass(frozen=True)
class Lesson:
    """A batch to learn from: texts that the target wrote, and what it thought while reading them.

    Texts are filled up on the right, to one length; `learn` is False there and wherever the next token is not the
    target's own.
    """

    tokens: torch.Tensor  # [batch, length]
    learn: torch.Tensor  # [batch, length], bool: the target's distribution at this row is worth learning
    taps: dict[int, torch.Tensor]  # layer -> [batch, length, width]: the residual stream after that layer
    probabilities: torch.Tensor  # [batch, length, draft tokens]: the target's, of the next token; sums to 1 or less
    best: torch.Tensor  # [batch, length]: the index among the draft tokens of its first choice; -1: none of them
    reread: Callable[[torch.Tensor], torch.Tensor] | None = None  # other texts of that shape -> their probabilities

    known_rows: Rows | None = None  # `rows`, where they are known without asking the device

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows worth learning, as places in [batch * length], filled up with the first row to a whole number."""
        return self._rows.places

    @cached_property
    def _rows(self) -> Rows:
        return self.known_rows or Rows.of(self.learn.flatten().nonzero()[:, 0])

    def at(self, x: torch.Tensor, before: int = 0) -> torch.Tensor:
        """Of [batch, length, ...], the rows worth learning, or those so far before them; [rows, ...]."""
        return x.flatten(0, 1).index_select(0, (self.rows - before).clamp_min(0))

    def counting(self, before: int = 0) -> torch.Tensor:
        """Which of `rows` count, as 1 and 0: those that do not fill up, and have so many rows of their text before."""
        return (self._rows.real & (self.rows % self.tokens.shape[1] >= before)).float()


@dataclass(frozen=True)
class Losses:
    """`total` is what training makes smaller; the rest is shown. Depth 0 is the first drafted token."""

    total: torch.Tensor
    accuracy: torch.Tensor  # [depths]: how often the head's first choice is the target's, the tokens before it given


class Head(nn.Module, ABC):
    """The part of a drafter that is trained."""

    taps: tuple[int, ...]  # layers of the target whose output it reads
    also_kept: int = 0  # numbers that drafting keeps for every token of context, beside K/V and hidden states
    tables: tuple[str, ...] = ()  # matrices that are no map of states: their rows stand for tokens, places or heads
    by_token: tuple[str, ...] = ()  # those with a row for each draft token, or several such blocks below each other
    few_will_do: bool = False  # it learns from the likeliest tokens of each row, and from nothing else of the target
    growing: tuple[str, ...] = ("vocabulary",)  # settings in which a head may go beyond the one that it goes on from

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame  # not a parameter: it is the target's

    def begin(self) -> None:
        """Take over from the target what is better to begin with than chance; called once, before the training."""

    def go_on(self, weights: Mapping[str, torch.Tensor], vocab: torch.Tensor) -> None:
        """Take over the weights of a head that knew these draft tokens, all of them among its own.

        Rows of tokens that are new stay as they are.
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
        """Its parameters that map states to states."""
        return [weight for name, weight in self.named_parameters() if weight.ndim == 2 and name not in self.tables]

    def stored_matrices(self) -> list[nn.Parameter]:
        """Its parameters that a file has in few bits."""
        return [weight for weight in self.parameters() if weight.ndim == 2]

    @abstractmethod
    def losses(self, lesson: Lesson) -> Losses:
        """What this head still has to learn from the lesson."""

    def facts(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        """What drafting wants to know of the trained head, from text that it has not learnt: kept with its figures."""
        return {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width], already normed -> [..., draft tokens], by the target's own rows."""
        return nn.functional.linear(hidden, self.frame.rows.to(hidden.dtype))

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The target's kind of norm."""
        return nn.functional.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), self.frame.config.norm_eps)


def distance(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of rows of logits [rows, draft tokens] against the target's probabilities, [rows].

    What the target gives to tokens outside the draft vocabulary is left out: nothing can be done about it.
    """
    return cross_entropy(logits, probabilities)


def hits(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Where the first choice of the rows is the target's, as 1 and 0."""
    return (logits.argmax(-1) == best).float()


def whole(count: int) -> int:
    """So many rows, filled up to one of not too many numbers of them."""
    return -(-count // _WHOLE) * _WHOLE


def mean(values: torch.Tensor, counting: torch.Tensor) -> torch.Tensor:
    """The mean of the values that count; 0 of none."""
    return (values * counting).sum() / counting.sum().clamp_min(1.0)
