"""`block`: a chain of drafts is verified as a whole, and the longest passing prefix is accepted.

Token by token, one unlucky draft rejects all that follow. Here a node's weight is min(1, its parent's times p(x) /
q(x)), so the surplus of one draft can make up for the deficit of another. After a node of weight w, let s be the sum of
the positive part of w p - q: the node may end the path with probability s / (s + 1 - w), the last one of the chain with
w. Each node draws its own random number; the deepest that passes ends the path, and the target's own token is drawn
from that positive part (at the end of the chain: from p). So a prefix, whatever follows it, is accepted with the
probability w of its last node. That is never less than the product of the single min(1, p(x) / q(x)) with which
`rejection` accepts it, and no lossless rule accepts more of a chain. Sun et al., "Block Verification Accelerates
Speculative Decoding" (2024).

A tree that branches is verified by `traversal`, which on a chain is this rule, number by number. `rejection` would be
wrong: whether a tree branches may depend on its drafts, and two rules that weigh one prefix differently are not
lossless together if what follows the prefix decides between them.
"""

from __future__ import annotations

import torch

from slipstream import noise
from slipstream.tree import TokenTree
from slipstream.verify.base import Distributions, Verdict, Verifier
from slipstream.verify.rejection import draw
from slipstream.verify.traversal import Traversal, after_rejection, families, proposal, share


class Block(Verifier):
    """Lossless in distribution and reproducible for one drafter; another drafter gives another text."""

    name = "block"
    uses_draws = True

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        below = families(tree)
        if any(len(children) > 1 for children in below):
            return Traversal()(tree, target)
        node, weight = 0, 1.0
        end = 0
        left: torch.Tensor | None = None  # after `end`, [vocab]
        while below[node] and weight > 0.0:
            (child,) = below[node]
            owed = weight * target.probabilities(node)
            q = proposal(tree, child, owed)
            rest, probability = after_rejection(owed, weight, q)
            if node == 0 or wins(target, node, probability):
                end, left = node, rest
            node, weight = child, share(float(owed[tree.tokens[child]]), float(q[tree.tokens[child]]))
        if left is None or wins(target, node, weight):
            end, left = node, target.probabilities(node)
        nodes = tree.path(end)
        own = draw(left, noise.uniform(target.key(end, noise.RESIDUAL)))
        return Verdict(nodes, [*(tree.tokens[kept] for kept in nodes), own])


def wins(target: Distributions, node: int, probability: float) -> bool:
    """Whether a node may end the path. Every node has its own random number."""
    return noise.uniform(target.key(node, noise.ACCEPT)) < probability
