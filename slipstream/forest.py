"""Forests: the trees of all lanes of a batch as arrays on a device, where no host looks at a tree.

Every lane has a tree of the same number of nodes. Node 0 is its root; parents stand before their children. What is done
with them here is done with tensors alone, so that it can be captured. Trees that the host sees are `tree.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream import noise
from slipstream.fused import runs_fused
from slipstream.types import GREEDY_TEMPERATURE

_LEAST = -60.0  # the least logarithm of a probability that is told apart
_ONE_PROGRAM = 16_384  # tokens of a row that one program reads


def geometry(parents: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths int64 [lanes, nodes], and bits int32 [lanes, nodes, words]: which nodes a node sees, itself included.

    `parents`: int64 [lanes, nodes]; a root is its own. No node is deeper than `levels`.
    """
    if runs_fused(parents):
        from slipstream.forest_kernels import geometry as kernel

        return kernel(parents, levels)
    lanes, nodes = parents.shape
    above = torch.arange(nodes, device=parents.device).expand(lanes, nodes)
    depths = torch.zeros_like(parents)
    sees = torch.nn.functional.one_hot(above, nodes)
    for _ in range(levels):
        depths += above > 0
        above = parents.gather(1, above)
        sees |= torch.nn.functional.one_hot(above, nodes)
    return depths, packed(sees)


def packed(marks: torch.Tensor) -> torch.Tensor:
    """Marks of 0 and 1, int64 [..., columns], as bits, int32 [..., words]."""
    count = -(-marks.shape[-1] // 32)
    filled = torch.nn.functional.pad(marks, (0, 32 * count - marks.shape[-1])).unflatten(-1, (count, 32))
    words: torch.Tensor = (filled << torch.arange(32, device=marks.device)).sum(-1)
    return words.to(torch.int32)


def own_bits(first: int, count: int, columns: int, device: torch.device) -> torch.Tensor:
    """The bits of nodes `first`, `first` + 1, ... alone, int32 [count, words], in words for so many columns."""
    return packed(torch.eye(columns, dtype=torch.int64, device=device)[first : first + count])


def walk(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The accepted paths: from each root down to the child that is the target's choice, as long as there is one.

    tokens, parents and chosen (what the target chooses behind each node) are int64 [lanes, nodes]. Returns the nodes,
    int64 [lanes, levels], 0 behind the end of a path, and how many there are, int64 [lanes].
    """
    if runs_fused(tokens):
        from slipstream.forest_kernels import walk as kernel

        return kernel(tokens, parents, chosen, levels)
    at = torch.zeros_like(tokens[:, :1])
    path = []
    alive = torch.ones_like(at, dtype=torch.bool)
    for _ in range(levels):
        fits = (parents == at) & (tokens == chosen.gather(1, at))
        fits[:, 0] = False  # a root is its own parent
        alive = alive & fits.any(1, keepdim=True)
        at = torch.where(alive, fits.int().argmax(1, keepdim=True), 0)
        path.append(at)
    nodes = torch.cat(path, 1) if path else tokens[:, :0]
    return nodes, (nodes > 0).sum(1)


@dataclass(frozen=True)
class Warmth:
    """How the target will choose behind rows of logits: its temperatures and its noise. Greedy rows have none."""

    temperatures: torch.Tensor  # float32 [rows]
    keys: torch.Tensor  # int64 [2, rows], of the noise at the very position that is chosen
    ids: torch.Tensor  # int64 [tokens]: the target's names of the tokens that the logits speak of


def likeliest(logits: torch.Tensor, count: int, warmth: Warmth | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of logits [rows, tokens] the likeliest tokens.

    Logarithms of their probabilities, float32 [rows, count], the highest first, and their indices, int64.
    """
    if runs_fused(logits) and logits.shape[1] <= _ONE_PROGRAM:
        from slipstream.forest_kernels import likeliest as kernel

        return kernel(logits, count, warmth)
    scores = logits.float()
    if warmth is not None:
        greedy = (warmth.temperatures < GREEDY_TEMPERATURE)[:, None]
        divisors = torch.where(greedy, 1.0, warmth.temperatures[:, None])
        drawn = scores / divisors + noise.gumbel_of(warmth.ids, warmth.keys).float()
        scores = torch.where(greedy, scores, drawn)
    top = scores.topk(count)
    return top.values - scores.logsumexp(-1, keepdim=True), top.indices


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Which are the highest of each row, int64 [rows, count], ascending; of equals the first."""
    if runs_fused(scores):
        from slipstream.forest_kernels import highest as kernel

        return kernel(scores, count)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


class Pool:
    """All nodes that came up while trees of one shape grew, level by level, and the choice of those to offer.

    A level's nodes are the children of the nodes that were followed in the level above: `branch` of each. Scores are
    logarithms of joint probabilities. A child's is never above its parent's, and of equals the first one counts more,
    so that a node is never taken without its parent.
    """

    def __init__(self, lanes: int, widths: list[int], branch: int, device: str) -> None:
        """`widths`: how many nodes of each level are followed, the root's level first."""
        self.widths = widths
        self._branch = branch
        sizes = [width * branch for width in widths]
        self._starts = [sum(sizes[:level]) for level in range(len(sizes) + 1)]
        size = self._starts[-1]
        self._scores = torch.zeros(lanes, size, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(lanes, size, dtype=torch.int64, device=device)
        self._parents = torch.zeros(lanes, size, dtype=torch.int64, device=device)  # in the pool, from 1 on; 0: root

    def __len__(self) -> int:
        return self._starts[-1]

    def begin(self) -> Followed:
        """The roots."""
        lanes = len(self._scores)
        zeros = torch.zeros(lanes, 1, dtype=torch.int64, device=self._scores.device)
        return Followed(zeros, zeros, zeros, zeros.float())

    def add(self, level: int, above: Followed, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """The children of the nodes followed in a level (the root's is 0), [lanes * width, branch] each."""
        here = slice(self._starts[level], self._starts[level + 1])
        width = above.places.shape[1]
        steps = scores.view(-1, width, self._branch).clamp(_LEAST, 0.0)
        self._scores[:, here] = (above.scores[..., None] + steps).flatten(1)
        self._tokens[:, here] = tokens.view(-1, width * self._branch)
        self._parents[:, here] = above.places.repeat_interleave(self._branch, 1)

    def follow(self, level: int) -> Followed:
        """The likeliest nodes of those added last (below `level`), which are to be followed, in their order."""
        start, stop = self._starts[level], self._starts[level + 1]
        top = highest(self._scores[:, start:stop], self.widths[level + 1])
        here = top + start
        return Followed(here + 1, self._tokens.gather(1, here), top // self._branch, self._scores.gather(1, here))

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and parents of the `count` likeliest nodes, int64 [lanes, count] each, numbered from 1 on."""
        chosen = highest(self._scores, count)
        lanes, size = self._scores.shape
        numbers = torch.zeros(lanes, size + 1, dtype=torch.int64, device=chosen.device)
        ranks = torch.arange(1, count + 1, device=chosen.device).expand(lanes, count)
        numbers.scatter_(1, chosen + 1, ranks)
        return self._tokens.gather(1, chosen), numbers.gather(1, self._parents.gather(1, chosen))


@dataclass(frozen=True)
class Followed:
    """Nodes of one level that are followed, [lanes, width] each."""

    places: torch.Tensor  # in the pool, counted from 1; 0 is the root
    tokens: torch.Tensor
    parents: torch.Tensor  # which of the nodes followed in the level above
    scores: torch.Tensor  # float32
