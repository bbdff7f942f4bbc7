"""Trees from levels guessed all at once, with a link from each token to the next.

Every level has candidates, and a link gives the probability of each after each candidate of the level before. All links
are computed together; then the host picks the tree best-first: the likeliest node whose parent is in the tree. Without
links the tree is that of `marginals.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

CANDIDATES = 64  # per level; less likely tokens are hardly on a path that is worth a node


def linked_candidates(scores: torch.Tensor, across: Callable[[torch.Tensor], torch.Tensor], reach: int) -> torch.Tensor:
    """Candidates of each level, [levels, candidates]: the tokens of the highest probability after one of the `reach`
    likeliest tokens of the level before, that token's own probability included.

    `across`: change of the logits of all tokens after tokens [levels - 1, reach], as [levels - 1, reach, tokens].
    """
    before, tokens = torch.topk(scores, min(reach, scores.shape[1]))
    chances = (before - scores.logsumexp(-1, keepdim=True))[:-1, :, None]
    after = torch.log_softmax(scores[1:, None] + across(tokens[:-1]), -1)
    reached = torch.cat([scores[:1], (after + chances).amax(1)])
    return torch.topk(reached, min(CANDIDATES, scores.shape[1])).indices


class Lattice:
    """Candidates of each level and their probabilities after each candidate of the level before."""

    def __init__(
        self,
        scores: torch.Tensor,
        link: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        branch: int,
        candidates: torch.Tensor | None = None,
    ) -> None:
        """`scores` [levels, tokens]: logits of each level without knowledge of the previous token.

        `link`: change of the logits of candidates [levels - 1, candidates] after tokens [levels - 1, before], as
        [levels - 1, before, candidates]. `branch`: most candidates after one token. `candidates` [levels, candidates]:
        by `linked_candidates`; None: those of the highest scores.
        """
        if candidates is None:
            candidates = torch.topk(scores, min(CANDIDATES, scores.shape[1])).indices
        best, self._tokens = scores.gather(1, candidates), candidates  # [levels, candidates]
        branch = min(branch, best.shape[1])
        whole = scores.logsumexp(-1)
        first = (best[0, :branch] - whole[0]).exp().clamp_max(1.0)  # after the root, which is known
        # Tokens that are not candidates keep their weight without a link.
        others = whole + (-torch.expm1((best.logsumexp(-1) - whole).clamp_max(0.0))).log()
        linked = best[1:, None] + link(self._tokens[:-1], self._tokens[1:])
        total = torch.logaddexp(linked.logsumexp(-1), others[1:, None])
        likely = torch.topk((linked - total[..., None]).exp().clamp_max(1.0), branch)  # [levels - 1, before, branch]
        # For each level and each token before it: the candidates that may follow, and their probabilities.
        self._next: list[list[list[int]]] = [[list(range(branch))], *likely.indices.tolist()]
        self._weights: list[list[list[float]]] = [[first.tolist()], *likely.values.tolist()]

    def best(self, nodes: int, min_confidence: float) -> list[tuple[int, int, float]]:
        """The `nodes` most probable nodes as (parent, token, joint probability), the best first.

        The root is node 0, the first of the list node 1; parents come before their children. Paths with a joint
        probability of 0 or below `min_confidence` are left out.
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
