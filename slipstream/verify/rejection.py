"""`rejection`: speculative sampling, on chains and on trees whose siblings were drawn without replacement.

At a node with target distribution p, the children are tried in the order they were drawn. A child x drawn from q is
accepted with probability min(1, p(x)/q(x)). If it is rejected, p becomes the normalised positive part of p - q, x is
removed from q, and the next sibling is tried against those. If all are rejected, the target's own token is drawn from
what is left of p. A chosen node (no q) is a draw from a one-hot distribution, so the same rule applies with q(x) = 1.
"""

from __future__ import annotations

from typing import cast

import torch

from slipstream import noise
from slipstream.tree import TokenTree
from slipstream.verify.base import Distributions, Verdict, Verifier


class Rejection(Verifier):
    """Lossless in distribution and reproducible for one drafter; another drafter gives another text."""

    name = "rejection"
    uses_draws = True

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        node = 0
        nodes: list[int] = []
        tokens: list[int] = []
        while True:
            child, left = try_children(tree, node, target)
            if child is None:
                tokens.append(draw(left, noise.uniform(target.key(node, noise.RESIDUAL))))
                return Verdict(nodes, tokens)
            nodes.append(child)
            tokens.append(tree.tokens[child])
            node = child


def try_children(tree: TokenTree, node: int, target: Distributions) -> tuple[int | None, torch.Tensor]:
    """The accepted child, if there is one, and the target's residual distribution at the time it was tried."""
    left = target.probabilities(node)
    q: torch.Tensor | None = None
    for child in tree.children(node):
        token, source = tree.tokens[child], tree.draws[child]
        if source is None:
            q = torch.zeros_like(left)
            q[token] = 1.0
        elif q is None:
            q = cast(torch.Tensor, source.q).to(left)
        if noise.uniform(target.key(child, noise.ACCEPT)) * float(q[token]) < float(left[token]):
            return child, left
        left = residual(left, q)
        q = without(q, token)
        if source is not None and float(q.sum()) == 0.0:
            break  # nothing is left to draw from: there is no further sibling
    return None, left


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The normalised positive part of p - q. If rounding leaves nothing, p and q were equal, and the result is p."""
    rest = (p - q).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if float(total) > 0.0 else p


def without(q: torch.Tensor, token: int) -> torch.Tensor:
    """q after `token` was drawn without replacement."""
    rest = q.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if float(total) > 0.0 else rest


def draw(p: torch.Tensor, u: float) -> int:
    """The token at which the cumulated p first exceeds u times its total; its probability is never 0."""
    cumulated = p.cumsum(0)
    index = int(torch.searchsorted(cumulated, u * float(cumulated[-1]), right=True))
    if index >= len(p) or float(p[index]) == 0.0:  # u * total rounded up to the total
        index = int(p.nonzero()[-1])
    return index
