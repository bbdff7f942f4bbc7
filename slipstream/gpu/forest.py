"""Forests: the trees of all lanes of a batch as arrays on a device.

Every lane has a tree of the same number of nodes. Node 0 is its root; parents come before their children. All
operations are on tensors, without the host, so that they can be captured. The host's trees are in `tree.py`.

Branches for tensors that are not on a GPU are the reference of the kernels: only tests run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipstream import noise
from slipstream.gpu.fused import runs_fused
from slipstream.types import GREEDY_TEMPERATURE

_LEAST = -60.0  # the smallest log-probability that is distinguished
_ONE_PROGRAM = 16_384  # tokens of a row that one program reads


def geometry(parents: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths int64 [lanes, nodes], and bits int32 [lanes, nodes, words]: the ancestors of a node, itself included.

    `parents`: int64 [lanes, nodes]; a root is its own. No node is deeper than `levels`.
    """
    if runs_fused(parents):
        from slipstream.gpu.kernels.forest_kernels import geometry as kernel

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
    """0/1 values int64 [..., columns] packed into bits, int32 [..., words]."""
    count = -(-marks.shape[-1] // 32)
    filled = torch.nn.functional.pad(marks, (0, 32 * count - marks.shape[-1])).unflatten(-1, (count, 32))
    words: torch.Tensor = (filled << torch.arange(32, device=marks.device)).sum(-1)
    return words.to(torch.int32)


def walk(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The accepted paths: from each root to the child that is the target's choice, as long as there is one.

    tokens, parents and chosen (the target's choice after each node) are int64 [lanes, nodes]. Returns the nodes, int64
    [lanes, levels], 0 after the end of a path, and how many there are, int64 [lanes].
    """
    if runs_fused(tokens):
        from slipstream.gpu.kernels.forest_kernels import walk as kernel

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


def count(
    counts: torch.Tensor,
    parents: torch.Tensor,
    origins: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    path: torch.Tensor,
    active: torch.Tensor,
) -> None:
    """Count the nodes whose parents were accepted, and those of them that were: `policy/tally.py` on the device.

    counts int64 [origins, depths, bins, 2]; parents, origins, depths and scores (logarithms of joint probabilities,
    all finite) are [lanes, nodes]; path int64 [lanes, levels], 0 after its end; active int64 [lanes], 0 for idle lanes.
    """
    if runs_fused(parents):
        from slipstream.gpu.kernels.forest_kernels import count as kernel

        kernel(counts, parents, origins, depths, scores, path, active)
        return
    _, levels, bins, _ = counts.shape
    accepted = torch.zeros_like(parents).scatter_(1, path, 1)
    accepted[:, 0] = 1
    offered = accepted.gather(1, parents) * active[:, None]
    offered[:, 0] = 0
    given = (scores - scores.gather(1, parents)).exp()
    which = (origins * levels + (depths - 1).clamp_min(0)) * bins + (given * bins).long().clamp_max(bins - 1)
    for place, marks in enumerate((offered, offered * accepted)):
        counts.view(-1, 2)[:, place].scatter_add_(0, which.flatten(), marks.flatten())


@dataclass(frozen=True)
class SamplingNoise:
    """How the target chooses after rows of logits: its temperatures and its noise. Greedy rows have none.

    Of several rows with the same temperature and key, one after another, there is one entry.
    """

    temperatures: torch.Tensor  # float32 [entries]
    keys: torch.Tensor  # int64 [2, entries], of the noise at the chosen position
    ids: torch.Tensor  # int64 [tokens]: the target's ids of the logits' columns


def likeliest_tokens(
    logits: torch.Tensor, count: int, sampling: SamplingNoise | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens of each row of logits [rows, tokens].

    Returns log-probabilities, float32 [rows, count], descending, and indices, int64.
    """
    if runs_fused(logits) and logits.shape[1] <= _ONE_PROGRAM:
        from slipstream.gpu.kernels.forest_kernels import likeliest_tokens as kernel

        return kernel(logits, count, sampling)
    scores = logits.float()
    if sampling is not None:
        each = len(scores) // len(sampling.temperatures)
        temperatures, keys = sampling.temperatures.repeat_interleave(each), sampling.keys.repeat_interleave(each, 1)
        greedy = (temperatures < GREEDY_TEMPERATURE)[:, None]
        divisors = torch.where(greedy, 1.0, temperatures[:, None])
        drawn = scores / divisors + noise.gumbel_of(sampling.ids, keys).float()
        scores = torch.where(greedy, scores, drawn)
    top = scores.topk(count)
    return top.values - scores.logsumexp(-1, keepdim=True), top.indices


@dataclass(frozen=True)
class Followed:
    """Nodes of one level that are expanded, [lanes, width] each."""

    places: torch.Tensor  # in the pool, counted from 1; 0 is the root
    tokens: torch.Tensor
    parents: torch.Tensor  # index of the parent among the expanded nodes of the level above, over all lanes
    scores: torch.Tensor  # float32: logs of joint probabilities
    bits: torch.Tensor  # int32 [lanes, width, words]: the expanded ancestors of each


class Offered(NamedTuple):
    """The nodes of a round's trees, [lanes, count] each."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor  # float32, finite: logs of joint probabilities
    joined: torch.Tensor  # 1: from a chain that was joined


def highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the highest scores of each row, int64 [rows, count], ascending; of equals the first.

    And for 0 and every index counted from 1, int64 [rows, 1 + size], its rank among them, counted from 1; or 0.
    """
    if runs_fused(scores):
        from slipstream.gpu.kernels.forest_kernels import highest as kernel

        return kernel(scores, count)
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    places = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.int64, device=scores.device)
    ranks = torch.arange(1, count + 1, device=scores.device).expand_as(chosen)
    return chosen, places.scatter_(1, chosen + 1, ranks)


class Pool:
    """All candidate nodes of trees of one shape, level by level, and the selection of those to verify.

    The nodes of a level are the `branch` children of each node that was expanded in the level above. Scores are logs of
    joint probabilities. A child's is never above its parent's, and of equals the first one wins, so that a node is
    never selected without its parent.
    """

    def __init__(self, lanes: int, widths: list[int], branch: int, device: str, chain: int = 0) -> None:
        """`widths`: nodes of each level that are expanded, the root's level first. `chain`: nodes that may join."""
        self.widths = widths
        self.branch = branch
        sizes = [width * branch for width in widths]
        self.starts = [sum(sizes[:level]) for level in range(len(sizes) + 1)]
        size = self.starts[-1] + chain
        self.scores = torch.full((lanes, size), float("-inf"), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(lanes, size, dtype=torch.int64, device=device)
        self.parents = torch.zeros(lanes, size, dtype=torch.int64, device=device)  # in the pool, from 1 on; 0: root
        zeros = torch.zeros(lanes, 1, dtype=torch.int64, device=device)
        columns = torch.eye(sum(widths), dtype=torch.int64, device=device)
        self._own = packed(columns).split(widths)  # the bits of the expanded nodes, level by level
        self._roots = Followed(zeros, zeros, zeros, zeros.float(), self._own[0].expand(lanes, 1, -1).contiguous())

    def __len__(self) -> int:
        return self.scores.shape[1]

    def begin(self) -> Followed:
        """The roots."""
        return self._roots

    def grow(
        self, level: int, above: Followed, scores: torch.Tensor, indices: torch.Tensor, ids: torch.Tensor
    ) -> Followed | None:
        """Add the children of the expanded nodes of a level (the root's is 0), and choose which of them to expand.

        scores and indices, [lanes * width, branch] each, come from `likeliest_tokens`; ids [tokens] are the token ids.
        The most likely are expanded, in index order; none after the last level.
        """
        if runs_fused(scores):
            from slipstream.gpu.kernels.forest_kernels import grow as kernel

            followed = kernel(self, level, above, scores, indices, ids, _LEAST)
            return None if followed is None else Followed(*followed)
        start, stop = self.starts[level], self.starts[level + 1]
        width = above.places.shape[1]
        steps = scores.view(-1, width, self.branch).clamp(_LEAST, 0.0)
        joint = (above.scores[..., None] + steps).flatten(1)
        tokens = ids[indices].view(-1, width * self.branch)
        self.scores[:, start:stop] = joint
        self.tokens[:, start:stop] = tokens
        self.parents[:, start:stop] = above.places.repeat_interleave(self.branch, 1)
        if level + 1 == len(self.widths):
            return None
        top, _ = highest(joint, self.widths[level + 1])
        parents = top // self.branch
        own = self._own[level + 1]
        bits = above.bits.gather(1, parents[..., None].expand(-1, -1, own.shape[1])) | own
        lines = torch.arange(len(top), device=top.device)[:, None] * width + parents
        return Followed(top + start + 1, tokens.gather(1, top), lines, joint.gather(1, top), bits)

    def join(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        """Merge chains below the roots into the pool: int64 [lanes, chain], float32 and non-increasing.

        Where a chain follows existing nodes, it raises their scores to its own; the rest of it is added. A parent is
        raised before its child and to no less, and added nodes come after all others: a child's score stays below its
        parent's, or equal and after it.
        """
        if runs_fused(scores):
            from slipstream.gpu.kernels.forest_kernels import join as kernel

            kernel(self, tokens, scores)
            return
        grown = self.starts[-1]
        at = torch.zeros_like(tokens[:, 0])
        for place, token, score in zip(range(grown, len(self)), tokens.T, scores.T, strict=True):
            fits = (self.parents[:, :grown] == at[:, None]) & (self.tokens[:, :grown] == token[:, None])
            raised = torch.where(fits, score[:, None], float("-inf"))
            self.scores[:, :grown] = self.scores[:, :grown].fmax(raised)
            there = fits.any(1)
            self.scores[:, place] = torch.where(there, float("-inf"), score)
            self.tokens[:, place] = token
            self.parents[:, place] = at
            at = torch.where(there, fits.int().argmax(1), place) + 1

    def best(self, count: int) -> Offered:
        """The `count` most likely nodes, numbered from 1."""
        chosen, places = highest(self.scores, count)
        return Offered(
            self.tokens.gather(1, chosen),
            places.gather(1, self.parents.gather(1, chosen)),
            self.scores.gather(1, chosen).clamp_min(_LEAST * len(self.widths)),
            (chosen >= self.starts[-1]).long(),
        )
