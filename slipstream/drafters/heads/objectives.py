"""What the logits of a head are trained for, row by row. p is the target's distribution, q the head's.

The overlap of a row, the sum over tokens of min(p, q), is the probability that speculative sampling accepts a token
drawn from q. Cross-entropy reaches the largest overlap only if q can become p, which a small head's cannot: the other
losses raise the overlap itself.

    cross_entropy   of q against p
    tv              total variation: 1 - overlap; hardly any gradient where the overlap is small
    mixed           0.1 cross-entropy + 0.9 L1, where L1 is twice the total variation
    lk              l * cross-entropy + (1 - l) * total variation with l = exp(-3 * overlap): a row begins with the
                    first and goes over to the second as its overlap grows (after Samarin et al., *LK Losses*, 2026,
                    where l follows the mean overlap of a depth)

p may sum to less than 1: the rest is on tokens outside the draft vocabulary, which the head cannot change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.drafters.heads.head import distance

Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits, probabilities [rows, tokens] -> [rows]

_SHARE = 0.1  # of cross-entropy in `mixed`
_SPEED = 3.0  # with which `lk` leaves cross-entropy


def overlap(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The probability that a token drawn from each row of logits is accepted, float32 [rows]."""
    return torch.minimum(torch.softmax(logits, -1, dtype=torch.float32), probabilities.float()).sum(-1)


def total_variation(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """`tv`."""
    return 1.0 - overlap(logits, probabilities)


def mixed(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """`mixed`."""
    far = 2.0 * total_variation(logits, probabilities)
    return _SHARE * distance(logits, probabilities) + (1.0 - _SHARE) * far


def lk(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """`lk`."""
    shared = overlap(logits, probabilities)
    weight = torch.exp(-_SPEED * shared.detach())
    return weight * distance(logits, probabilities) + (1.0 - weight) * (1.0 - shared)


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": distance,
    "tv": total_variation,
    "mixed": mixed,
    "lk": lk,
}
