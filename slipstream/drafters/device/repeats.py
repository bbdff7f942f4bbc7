"""`suffix` on the device: what followed the longest suffix of a text that occurred before.

An automaton does not suit a GPU. Instead the root and the tokens before it are compared with every earlier position.
The latest of the longest matches counts, and what followed it is the draft: one chain. If the chain reaches the root,
it continues from the start of the match, as a looping text does.

Branches for tensors that are not on a GPU are the reference of the kernels: only tests run them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch

from slipstream.cache import PAGE_SIZE
from slipstream.gpu.fused import runs_fused
from slipstream.gpu.lanes import Lanes
from slipstream.sequence import Sequence

_LONGEST = 16  # longest match that is distinguished
_DOUBT = 1.5
_SINGLE, _LOOP = 0.23, 0.98  # probabilities after a match of one token, and after the longest, mostly in loops


def match_probability(matched: int) -> float:
    """The probability that a text continues as it did after a match of so many tokens.

    Counted in 500 greedy answers of a small model: 0.54 after 2 tokens, 0.74 after 4, 0.84 after 8, 0.89 after 15.
    """
    if matched >= _LONGEST:
        return _LOOP
    return _SINGLE if matched == 1 else matched / (matched + _DOUBT)


def chain_scores(length: int, min_match: int) -> torch.Tensor:
    """Logarithms of joint probabilities of a chain after a match, float32 [1 + longest match, length].

    Along a chain the match grows by one token per step. Matches below `min_match` give no chain: -inf.
    """
    rows = [[-math.inf] * length for _ in range(min_match)]
    for matched in range(min_match, 1 + max(_LONGEST, min_match)):
        rows.append(list(accumulate(math.log(match_probability(matched + step)) for step in range(length))))
    return torch.tensor(rows, dtype=torch.float32)


def follow(
    history: torch.Tensor, taken: torch.Tensor, accepted: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the newest tokens, and find what may come next.

    history int32 [lanes, room]: the texts; taken int64 [lanes, fresh]: the newest tokens, of which the root is token
    `accepted` [lanes], at `slots` [lanes]; scores: `chain_scores`. Returns the chains after the roots, int64 [lanes,
    length], and their scores.
    """
    if runs_fused(history):
        from slipstream.drafters.device.repeat_kernels import follow as kernel

        return kernel(history, taken, accepted, slots, scores)
    room, (longest, length) = history.shape[1], scores.shape
    fresh = torch.arange(taken.shape[1], device=taken.device)
    # Tokens written after the root are not part of the text, and are overwritten before they are read.
    history.scatter_(1, (slots - accepted)[:, None] + fresh, taken.int())
    places, roots = torch.arange(room, device=history.device), slots[:, None]
    same = places < roots
    matched = torch.zeros_like(history, dtype=torch.int64)
    for back in range(longest - 1):
        before = torch.nn.functional.pad(history, (back, 0), value=-1)[:, :room]  # no token is -1
        same = same & (before == history.gather(1, (roots - back).clamp_min(0)))
        matched += same
    best = torch.where(matched > 0, matched * room + places, 0).amax(1, keepdim=True)  # the latest of equal ones
    found = best % room
    period = (roots - found).clamp_min(1)
    chain = found + 1 + torch.arange(length, device=history.device) % period
    return history.gather(1, chain).long(), scores[best[:, 0] // room]


class Repeats:
    """The texts of lanes, and their chains."""

    def __init__(self, lanes: Lanes, length: int, min_match: int) -> None:
        """`length`: of the chains; `min_match`: the shortest match that gives one."""
        self._lanes = lanes
        room = lanes.tables.shape[1] * PAGE_SIZE
        self._history = torch.zeros(lanes.size, room, dtype=torch.int32, device=lanes.device)
        self._scores = chain_scores(length, min_match).to(lanes.device)

    def fill(self, sequences: Mapping[int, Sequence]) -> None:
        """Copy the texts of the sequences."""
        texts = [sequence.tokens for sequence in sequences.values()]
        lines = np.zeros((len(texts), max(map(len, texts))), dtype=np.int32)
        for line, text in zip(lines, texts, strict=True):
            line[: len(text)] = text
        which = torch.tensor(list(sequences), device=self._history.device)
        self._history[which, : lines.shape[1]] = torch.from_numpy(lines).to(self._history.device)

    def chains(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the newest tokens; the chains after the roots, and their scores, [lanes, length] each."""
        lanes = self._lanes
        return follow(self._history, lanes.last_tokens, lanes.accepted, lanes.slots, self._scores)
