"""`block`: a chain of drafts is judged as a whole, and the longest part that passes stands.

Token by token, one unlucky draft refuses all that follow. Here a node's weight is min(1, its parent's times
p(x) / q(x)), so what one draft has to spare can make up for what another lacks. After a node of weight w, let s be the
sum of the positive part of w p - q: the node may end the path with probability s / (s + 1 - w), the last one of the
chain with w. Each throws its own dice; the deepest that wins ends the path, and the target's own token is drawn from
that positive part (at the end of the chain: from p). So a prefix, whatever may follow it, stands with the probability w
of its last node. That is never less than the product of the single min(1, p(x) / q(x)) with which `rejection` keeps it,
and no lossless rule keeps more of a chain. Sun et al., "Block Verification Accelerates Speculative Decoding" (2024).

A tree that branches is judged by `traversal`, which on a chain is this rule, number by number. `rejection` would not
do: whether a tree branches may depend on the drafts in it, and two rules that weigh one prefix differently are not
lossless together if what follows the prefix decides between them.
"""

from __future__ import annotations

import torch

from slipstream import noise
from slipstream.tree import TokenTree
from slipstream.verify.base import Distributions, Verdict, Verifier
from slipstream.verify.rejection import draw
from slipstream.verify.traversal import Traversal, after_fall, families, proposal, share


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
            rest, chance = after_fall(owed, weight, q)
            if node == 0 or wins(target, node, chance):
                end, left = node, rest
            node, weight = child, share(float(owed[tree.tokens[child]]), float(q[tree.tokens[child]]))
        if left is None or wins(target, node, weight):
            end, left = node, target.probabilities(node)
        nodes = tree.path(end)
        own = draw(left, noise.uniform(target.key(end, noise.RESIDUAL)))
        return Verdict(nodes, [*(tree.tokens[kept] for kept in nodes), own])


def wins(target: Distributions, node: int, chance: float) -> bool:
    """Whether a node may end the path. Every node has a number of its own."""
    return noise.uniform(target.key(node, noise.ACCEPT)) < chance
