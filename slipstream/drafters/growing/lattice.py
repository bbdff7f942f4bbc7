"""Trees from levels that were guessed all at once, where each token is linked to the one before it.

Every level has its candidates, and a link says how likely each of them follows each candidate of the level before. All
links are computed together, and the tree is then picked on the host: the best node whose parent is there, again and
again. Without links it would be the tree of `marginals.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

CANDIDATES = 64  # of a level; a token below them may follow a rare one, but hardly in a path that is worth a node


class Lattice:
    """Candidates of each level and their probabilities behind each candidate of the level before."""

    def __init__(
        self, scores: torch.Tensor, link: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], branch: int
    ) -> None:
        """`scores` [levels, tokens]: logits of each level, the token before it unknown.

        `link`: what to add to the logits of candidates [levels - 1, candidates] behind tokens [levels - 1, before], as
        [levels - 1, before, candidates]. `branch`: how many candidates may follow a token.
        """
        best, self._tokens = torch.topk(scores, min(CANDIDATES, scores.shape[1]))  # [levels, candidates]
        branch = min(branch, best.shape[1])
        whole = scores.logsumexp(-1)
        first = (best[0, :branch] - whole[0]).exp().clamp_max(1.0)  # behind the root, which is known
        # Tokens that are no candidates keep the weight that they have without a link.
        others = whole + (-torch.expm1((best.logsumexp(-1) - whole).clamp_max(0.0))).log()
        linked = best[1:, None] + link(self._tokens[:-1], self._tokens[1:])
        total = torch.logaddexp(linked.logsumexp(-1), others[1:, None])
        likely = torch.topk((linked - total[..., None]).exp().clamp_max(1.0), branch)  # [levels - 1, before, branch]
        # Of each level, behind each token before it, the candidates that may follow and their probabilities.
        self._next: list[list[list[int]]] = [[list(range(branch))], *likely.indices.tolist()]
        self._weights: list[list[list[float]]] = [[first.tolist()], *likely.values.tolist()]

    def best(self, nodes: int, min_confidence: float) -> list[tuple[int, int, float]]:
        """The `nodes` most probable nodes as (parent, token, joint probability), the best first.

        The root is node 0 and the first of the list node 1, so that parents come before their children. A path without
        hope (a joint probability of 0, or under `min_confidence`) is left out.
        """
        tokens: list[list[int]] = self._tokens.tolist()
        found: list[tuple[int, int, float]] = []
        places = [(-1, 0, 1.0)]  # of the root and of every node found: level, candidate, joint probability
        waiting: list[tuple[float, int, int, int]] = []  # (-joint, parent, rank among its children, candidate)

        def consider(parent: int, rank: int) -> None:
            level, candidate, joint = places[parent]
            if level + 1 < len(self._next) and rank < len(self._next[level + 1][candidate]):
                joint *= self._weights[level + 1][candidate][rank]
                if joint > 0.0 and joint >= min_confidence:
                    heapq.heappush(waiting, (-joint, parent, rank, self._next[level + 1][candidate][rank]))

        consider(0, 0)
        while waiting and len(found) < nodes:
            lost, parent, rank, candidate = heapq.heappop(waiting)
            level = places[parent][0] + 1
            found.append((parent, tokens[level][candidate], -lost))
            places.append((level, candidate, -lost))
            consider(parent, rank + 1)  # the next best sibling
            consider(len(found), 0)  # the best child
        return found
