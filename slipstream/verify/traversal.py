"""`traversal`: whole paths are verified, from the leaves to the root, on chains and on trees.

Every node has a *weight*: the probability that it is accepted, given the drafts above it and all rejections so far. The
root's is 1. A node of weight w *owes* token y, as the next one, the probability w p(y). A child x drawn from q pays
min(owed(x), q(x)) of that, so its own weight is min(1, owed(x) / q(x)). If it is rejected, with all below it, the node
owes what the child could not pay, given the rejection:

    owed = positive part of (owed - q), divided by the probability that the child is rejected
    weight = the sum of owed

The next sibling is tried against that and against q without x. A node whose children are all rejected, or that has
none, is accepted with its weight; the target's own token is then drawn from what it owes. Summed over the child's
token, what was paid and what is owed afterwards give what was owed before, and the node is rejected as often as before:
drawing children below a node does not change the output distribution. That holds for any tree, if the number of
children of a node was decided before they were drawn. A chosen node (no q) is a draw from a one-hot q.

On a chain this is block verification. Weng et al., "Traversal Verification for Speculative Tree Decoding" (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from slipstream import noise
from slipstream.tree import TokenTree
from slipstream.verify.base import Distributions, Verdict, Verifier
from slipstream.verify.rejection import draw, without


class Traversal(Verifier):
    """Lossless in distribution and reproducible for one drafter; another drafter gives another text."""

    name = "traversal"
    uses_draws = True

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        below = families(tree)
        path = [_Open(0, 1.0, iter(below[0]))]
        while True:
            here = path[-1]
            child = next(here.untried, None)
            if child is not None:
                weight = here.offer(tree, child, target)
                path.append(_Open(child, weight, iter(below[child] if weight > 0.0 else ())))
            elif here.node == 0 or noise.uniform(target.key(here.node, noise.ACCEPT)) < here.weight:
                nodes = [opened.node for opened in path[1:]]
                own = draw(here.left(target), noise.uniform(target.key(here.node, noise.RESIDUAL)))
                return Verdict(nodes, [*(tree.tokens[node] for node in nodes), own])
            else:
                path.pop()
                path[-1].child_rejected()


class _Open:
    """A node of the path that is being tried, and its state."""

    def __init__(self, node: int, weight: float, untried: Iterator[int]) -> None:
        self.node = node
        self.weight = weight
        self.untried = untried
        self._owed: torch.Tensor | None = None  # [vocab]; sums to `weight`; computed with the first child
        self._q: torch.Tensor | None = None  # [vocab]; what the last tried child was drawn from
        self._token = -1  # of that child

    def offer(self, tree: TokenTree, child: int, target: Distributions) -> float:
        """The weight of the next child."""
        if self._owed is None:
            self._owed = self.weight * target.probabilities(self.node)
        if tree.draws[child] is None or self._q is None:
            self._q = proposal(tree, child, self._owed)
        else:
            self._q = without(self._q, self._token)
        self._token = tree.tokens[child]
        return share(float(self._owed[self._token]), float(self._q[self._token]))

    def child_rejected(self) -> None:
        """The last tried child is rejected, and everything below it."""
        assert self._owed is not None and self._q is not None
        self._owed, self.weight = after_rejection(self._owed, self.weight, self._q)

    def left(self, target: Distributions) -> torch.Tensor:
        """The distribution of the target's own token."""
        return target.probabilities(self.node) if self._owed is None else self._owed


def families(tree: TokenTree) -> list[list[int]]:
    """The children of every node that may be accepted, in index order."""
    below: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree)):
        if not tree.scouts[node]:
            below[tree.parents[node]].append(node)
    return below


def proposal(tree: TokenTree, child: int, like: torch.Tensor) -> torch.Tensor:
    """The distribution of a first child, [vocab]; one-hot for a chosen one."""
    source = tree.draws[child]
    if source is not None:
        return cast(torch.Tensor, source.q).to(like)
    q = torch.zeros_like(like)
    q[tree.tokens[child]] = 1.0
    return q


def share(owed: float, q: float) -> float:
    """min(1, owed / q): 0 for a token that is owed nothing, and no division by a q of 0."""
    return owed / q if owed < q else float(owed > 0.0)


def after_rejection(owed: torch.Tensor, weight: float, q: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What a node owes, and its weight, after a child drawn from q was rejected."""
    rest = (owed - q).clamp_(min=0.0)
    total = float(rest.sum())
    rejected = total + (1.0 - weight)  # = 1 - sum of min(owed, q), without its rounding: a weight of 1 stays exactly 1
    if rejected == 0.0:
        return owed, weight  # owed and q are equal: the child cannot be rejected, but `block` asks before it knows
    return rest.div_(rejected), total / rejected
