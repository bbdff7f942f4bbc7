"""`typical`: a drafted token is accepted if the target finds it likely enough. Lossy.

A token x is accepted after a node with distribution p if p(x) exceeds the smaller of EPSILON and DELTA times
exp(-entropy of p): where the target is certain, only its own choice; otherwise any plausible token. Of all accepted
paths the longest is kept, of equally long ones the likelier. The target's own token after it is drawn from p.

The output does not follow the target's distribution: it over-represents typical tokens and the drafter's preferences.
Greedy decoding has one token of probability 1 at every node, so it is the same as under `match`. Cai et al., "Medusa:
Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from __future__ import annotations

import math

import torch

from slipstream import noise
from slipstream.tree import TokenTree
from slipstream.verify.base import Distributions, Verdict, Verifier
from slipstream.verify.rejection import draw

EPSILON = 0.09  # Medusa's defaults
DELTA = 0.3


class Typical(Verifier):
    """Lossy: the output may differ from the target's distribution, for more accepted tokens."""

    name = "typical"
    uses_draws = False
    lossy = True

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        accepted = {0: 0.0}  # node -> log-probability of the path to it
        rows: dict[int, tuple[torch.Tensor, float]] = {}  # of the accepted nodes that have children
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if tree.scouts[node] or parent not in accepted:
                continue
            if parent not in rows:
                p = target.probabilities(parent)
                rows[parent] = p, threshold(p)
            p, least = rows[parent]
            probability = float(p[tree.tokens[node]])
            if probability > least:
                accepted[node] = accepted[parent] + math.log(probability)
        end = max(accepted, key=lambda node: (tree.depths[node], accepted[node], -node))
        left = rows[end][0] if end in rows else target.probabilities(end)
        nodes = tree.path(end)
        own = draw(left, noise.uniform(target.key(end, noise.RESIDUAL)))
        return Verdict(nodes, [*(tree.tokens[kept] for kept in nodes), own])


def threshold(p: torch.Tensor) -> float:
    """The probability that a token must exceed to be typical of p, [vocab]. Never 0."""
    return min(EPSILON, DELTA * math.exp(-float(torch.special.entr(p).sum())))
