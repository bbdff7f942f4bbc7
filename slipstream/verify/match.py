"""`match`: a drafted token is accepted if it is the target's own choice.

The target's choice at a position is an argmax (greedy) or an argmax over logits plus Gumbel noise of the position
(sampling). It does not depend on the draft, so the text is the same with any drafter or none.
"""

from __future__ import annotations

from slipstream.tree import TokenTree
from slipstream.verify.base import Distributions, Verdict, Verifier


class Match(Verifier):
    """Lossless and drafter-invariant: same seed, same text."""

    name = "match"
    uses_draws = False

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        node = 0
        nodes: list[int] = []
        tokens: list[int] = []
        while True:
            token = target.choose(node)
            tokens.append(token)
            child = tree.child(node, token)
            if child is None:
                return Verdict(nodes, tokens)
            nodes.append(child)
            node = child
