"""TokenTree: the only thing drafters make.

Node 0 is the last committed token (the root). Every other node is a guess for the position after its parent's. A chain
is a tree; plain decoding is a tree of one node. A node's parent always has a smaller index, so a tree can be walked,
masked and cut front to back.

A node is either *chosen* (no `q`: a one-hot guess that may be pruned, re-ranked and merged) or *sampled* (drawn from a
distribution `q`, without replacement among its siblings, in index order). Whoever looks at the token of a sampled node
before deciding to drop it changes the distribution of the output, so `pruned` and `merge` refuse them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import DraftFault, OptionError


@dataclass(frozen=True)
class Draw:
    """Where a sampled node came from: `q` over the whole vocabulary, shared by all children of one node.

    `q` is a one-dimensional float tensor that sums to 1. It is the distribution that was sampled from, after every
    transformation; siblings are drawn from it without replacement.
    """

    q: Any

    def is_distribution(self, vocab_size: int) -> bool:
        """Whether q is finite, not negative, sums to 1 and covers the vocabulary."""
        if tuple(getattr(self.q, "shape", ())) != (vocab_size,):
            return False
        return float(self.q.min()) >= 0.0 and abs(float(self.q.sum()) - 1.0) < 1e-5


@dataclass(frozen=True)
class Prepared:
    """What drafting has already computed of a tree's pass: every node has been through the first `layers` layers.

    Their K/V lie where the pass would write them, and `hidden` [nodes, width] goes into the next layer.
    """

    layers: int
    hidden: Any


class TokenTree:
    """Guesses for what follows the last committed token."""

    __slots__ = ("_child", "confidence", "depths", "draws", "origins", "parents", "prepared", "scouts", "tokens")

    def __init__(self, root_token: int) -> None:
        self.tokens: list[int] = [root_token]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.origins: list[str | None] = [None]
        self.confidence: list[float] = [1.0]  # the drafter's own estimate of the joint probability of the path
        self.scouts: list[bool] = [False]  # ride along for the drafter's use; can never be accepted
        self.draws: list[Draw | None] = [None]
        self.prepared: Prepared | None = None  # of this tree as it is: one that is cut or merged has lost it
        self._child: dict[tuple[int, int], int] = {}

    @classmethod
    def chain(cls, root_token: int, tokens: Iterable[int], origin: str | None = None) -> TokenTree:
        """A tree without branches."""
        tree = cls(root_token)
        node = 0
        for token in tokens:
            node = tree.add(node, token, origin=origin)
        return tree

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.depths[-1] == len(self.depths) - 1

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """Nodes offered: the root and the scouts do not count."""
        return len(self.tokens) - 1 - sum(self.scouts)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for a lone root."""
        return max(self.depths)

    @property
    def sampled(self) -> bool:
        """Whether any node was drawn from a distribution."""
        return any(draw is not None for draw in self.draws)

    def add(
        self,
        parent: int,
        token: int,
        *,
        origin: str | None = None,
        confidence: float = 1.0,
        draw: Draw | None = None,
        scout: bool = False,
    ) -> int:
        """Add a child and return its index. A chosen child that is there already is returned, not added twice."""
        if not 0 <= parent < len(self.tokens):
            raise DraftFault(f"a drafted node names parent {parent}, but the tree has {len(self.tokens)} nodes")
        known = self._child.get((parent, token))
        if known is not None and not scout:
            if draw is not None or self.draws[known] is not None:
                raise DraftFault(f"token {token} was drawn twice below node {parent}; siblings never repeat")
            self.confidence[known] = max(self.confidence[known], confidence)
            return known
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.origins.append(origin)
        self.confidence.append(confidence)
        self.scouts.append(scout)
        self.draws.append(draw)
        if not scout:
            self._child[(parent, token)] = node
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that guesses `token`, if there is one that may be accepted."""
        return self._child.get((node, token))

    def children(self, node: int) -> list[int]:
        """Children that may be accepted, in index order (for sampled nodes: the order they were drawn in)."""
        return [i for i in range(node + 1, len(self.tokens)) if self.parents[i] == node and not self.scouts[i]]

    def last_scouts(self) -> list[int]:
        """Scouts without children: what the target says after them is what they were sent for."""
        if not any(self.scouts):
            return []
        parents = set(self.parents)
        return [i for i in range(1, len(self.tokens)) if self.scouts[i] and i not in parents]

    def path(self, node: int) -> list[int]:
        """Nodes from the root (excluded) down to `node` (included)."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens on the path from the root (excluded) to `node`."""
        return [self.tokens[i] for i in self.path(node)]

    def walk(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that spell the longest possible beginning of `tokens` below the root."""
        nodes: list[int] = []
        node = 0
        for token in tokens:
            found = self.child(node, token)
            if found is None:
                break
            nodes.append(found)
            node = found
        return nodes

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """[n, n]: row i is True at i and at every ancestor of i."""
        size = len(self.tokens)
        mask = np.eye(size, dtype=np.bool_)
        for node in range(1, size):
            mask[node] |= mask[self.parents[node]]
        return mask

    def merge(self, other: TokenTree) -> None:
        """Add every node of `other` that is not here yet; same prefix, one node. Chosen nodes only.

        Scouts belong to the drafter that sent them and are never folded into one.
        """
        if other.tokens[0] != self.tokens[0]:
            raise DraftFault("trees with different roots cannot be merged")
        if self.sampled or other.sampled:
            raise OptionError("sampled nodes cannot be merged: it would change the distribution of the output")
        moved = [0]
        for node in range(1, len(other)):
            moved.append(
                self.add(
                    moved[other.parents[node]],
                    other.tokens[node],
                    origin=other.origins[node],
                    confidence=other.confidence[node],
                    scout=other.scouts[node],
                )
            )

    def pruned(self, budget: int) -> TokenTree:
        """The `budget` chosen nodes of highest joint confidence (ties: the earlier node), kept connected."""
        if len(self) - 1 <= budget:
            return self
        if self.sampled:
            raise OptionError("sampled nodes cannot be pruned by confidence: it would change the output")
        order = sorted(range(1, len(self)), key=lambda i: (-self._reach(i), i))
        return self._kept({0, *order[: max(0, budget)]})

    def cut(self, depth: int) -> TokenTree:
        """The nodes down to `depth`. The rule does not look at tokens, so sampled nodes may be cut too."""
        if self.depth <= depth:
            return self
        return self._kept({i for i in range(len(self)) if self.depths[i] <= depth})

    def _reach(self, node: int) -> float:
        """Confidence that can only fall along a path, so that keeping the best nodes keeps their ancestors."""
        return min([self.confidence[i] for i in self.path(node)], default=1.0)

    def _kept(self, keep: set[int]) -> TokenTree:
        smaller = TokenTree(self.tokens[0])
        moved = {0: 0}
        for node in range(1, len(self)):
            if node in keep and self.parents[node] in moved:
                moved[node] = smaller.add(
                    moved[self.parents[node]],
                    self.tokens[node],
                    origin=self.origins[node],
                    confidence=self.confidence[node],
                    draw=self.draws[node],
                    scout=self.scouts[node],
                )
        return smaller

    def check(self, root_token: int, vocab_size: int) -> None:
        """Raise DraftFault unless this is a tree that the engine can verify."""
        if self.tokens[0] != root_token:
            raise DraftFault(f"the root is token {self.tokens[0]}, but the last committed token is {root_token}")
        for node in range(1, len(self)):
            token, confidence = self.tokens[node], self.confidence[node]
            if not 0 <= token < vocab_size:
                raise DraftFault(f"drafted token {token} is outside the vocabulary of {vocab_size}")
            if not 0.0 <= confidence <= 1.0 + 1e-6:  # NaN fails too
                raise DraftFault(f"a drafted node has confidence {confidence}")
            if self.scouts[self.parents[node]] and not self.scouts[node]:
                raise DraftFault("a node that may be accepted hangs below a scout")
        self._check_draws(vocab_size)

    def _check_draws(self, vocab_size: int) -> None:
        """A q that is no distribution, or not the one its nodes were drawn from, would bend the output unseen."""
        kinds: dict[int, Draw | None] = {}
        for node in range(1, len(self)):
            if self.scouts[node]:
                continue
            draw, known = self.draws[node], self.parents[node] in kinds
            if kinds.setdefault(self.parents[node], draw) is not draw:
                raise DraftFault("siblings must all be chosen, or all be drawn from one distribution")
            if draw is None:
                continue
            if not known and not draw.is_distribution(vocab_size):
                raise DraftFault(f"the q below node {self.parents[node]} is no distribution over {vocab_size} tokens")
            if not float(draw.q[self.tokens[node]]) > 0.0:
                raise DraftFault(f"token {self.tokens[node]} was drawn from a q in which it has no probability")
