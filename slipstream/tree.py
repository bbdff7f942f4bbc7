"""TokenTree: the only output of drafters.

Node 0 is the last committed token (the root). Every other node is a guess for the position after its parent's. A chain
is a tree; plain decoding is a tree of one node. A node's parent always has a smaller index, so a tree can be walked,
masked and truncated front to back.

A node is either *chosen* (no `q`: a one-hot guess that may be pruned, re-ranked and merged) or *sampled* (drawn from a
distribution `q`, without replacement among its siblings, in index order). Dropping a sampled node because of its token
changes the distribution of the output. So sampled nodes are never dropped for their confidence: `pruned` and `limited`
raise if they would have to, and `merge` always refuses. `truncated` looks at depth alone and may drop any node.

Trees grow by `add`, `chain` and `merge` alone; their columns are read-only. `check`, which the engine calls before it
uses a tree, finds other modifications.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.draw import Draw
from slipstream.errors import DraftFault, OptionError
from slipstream.tree_check import KINDS, MOST_NODES, check_columns, children_of

__all__ = ["Draw", "Prepared", "TokenTree"]


@dataclass(frozen=True)
class Prepared:
    """What drafting has already computed of a tree's pass: every node has been through the first `layers` layers.

    Their K/V are where the pass would write them, and `hidden` [nodes, width] is the input of the next layer.
    """

    layers: int
    hidden: Any


def _whole(number: Any, what: str) -> int:
    """An integer of any type (numpy's, a tensor of one element) as an int."""
    try:
        return int(operator.index(number))
    except TypeError:
        raise DraftFault(f"a drafted {what} is of type {type(number).__name__} and no whole number") from None


class TokenTree:
    """Guesses for what follows the last committed token."""

    __slots__ = ("_child", "_confidence", "_depths", "_draws", "_origins", "_parents", "_scouts", "_tokens", "prepared")

    def __init__(self, root_token: int) -> None:
        self._tokens: list[int] = [root_token if type(root_token) is int else _whole(root_token, "token")]
        self._parents: list[int] = [-1]
        self._depths: list[int] = [0]
        self._origins: list[str | None] = [None]
        self._confidence: list[float] = [1.0]
        self._scouts: list[bool] = [False]
        self._draws: list[Draw | None] = [None]
        self._child: dict[tuple[int, int], int] = {}
        self.prepared: Prepared | None = None  # belongs to exactly this tree: a tree derived from it has none

    @classmethod
    def chain(cls, root_token: int, tokens: Iterable[int], origin: str | None = None) -> TokenTree:
        """A tree without branches."""
        tree = cls(root_token)
        node = 0
        for token in tokens:
            node = tree.add(node, token, origin=origin)
        return tree

    # -- the columns, an item for each node ---------------------------------------------------------------------------

    @property
    def tokens(self) -> Sequence[int]:
        """The drafted tokens; the root's is the last committed token."""
        return self._tokens

    @property
    def parents(self) -> Sequence[int]:
        """Indices of the parents, each smaller than the node's own; the root's is -1."""
        return self._parents

    @property
    def depths(self) -> Sequence[int]:
        """The number of ancestors: positions after the root's."""
        return self._depths

    @property
    def origins(self) -> Sequence[str | None]:
        """The drafter that a node comes from."""
        return self._origins

    @property
    def confidence(self) -> Sequence[float]:
        """The drafter's own estimate of the joint probability of the path."""
        return self._confidence

    @property
    def scouts(self) -> Sequence[bool]:
        """Whether a node is in the pass for the drafter's own use; it can never be accepted."""
        return self._scouts

    @property
    def draws(self) -> Sequence[Draw | None]:
        """The distribution that a sampled node was drawn from; None for a chosen one."""
        return self._draws

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self._depths[-1] == len(self._depths) - 1

    @property
    def drafted(self) -> int:
        """Nodes offered: the root and the scouts do not count."""
        return len(self._tokens) - 1 - sum(self._scouts)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for a single root."""
        return max(self._depths)

    @property
    def sampled(self) -> bool:
        """Whether any node was drawn from a distribution."""
        return any(draw is not None for draw in self._draws)

    # -- growing ------------------------------------------------------------------------------------------------------

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
        """Add a child and return its index. A chosen child that exists is returned, not added again."""
        if type(token) is not int or type(parent) is not int or type(confidence) is not float:
            token, parent, confidence = _whole(token, "token"), _whole(parent, "node's parent"), float(confidence)
        node = len(self._tokens)
        if not 0 <= parent < node:
            raise DraftFault(f"a drafted node names parent {parent}, but the tree has {node} nodes")
        known = self._child.get((parent, token))
        if known is not None and not scout:
            if draw is not None or self._draws[known] is not None:
                raise DraftFault(f"token {token} was drawn twice below node {parent}; siblings never repeat")
            self._confidence[known] = max(self._confidence[known], confidence)
            return known
        if node >= MOST_NODES:
            raise DraftFault(f"a drafted tree has more than {MOST_NODES} nodes")
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._origins.append(origin)
        self._confidence.append(confidence)
        self._scouts.append(scout)
        self._draws.append(draw)
        if not scout:
            self._child[(parent, token)] = node
        return node

    def merge(self, other: TokenTree) -> None:
        """Add every node of `other` that is missing here; nodes with the same path are one. Chosen nodes only.

        Scouts belong to the drafter that sent them and are never merged.
        """
        if other._tokens[0] != self._tokens[0]:
            raise DraftFault("trees with different roots cannot be merged")
        if self.sampled or other.sampled:
            raise OptionError("sampled nodes cannot be merged: it would change the distribution of the output")
        moved = [0]
        for node in range(1, len(other)):
            moved.append(
                self.add(
                    moved[other._parents[node]],
                    other._tokens[node],
                    origin=other._origins[node],
                    confidence=other._confidence[node],
                    scout=other._scouts[node],
                )
            )

    # -- reading ------------------------------------------------------------------------------------------------------

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that guesses `token`, if there is one that may be accepted."""
        return self._child.get((node, token))

    def children(self, node: int) -> list[int]:
        """Children that may be accepted, in index order (for sampled nodes: the order they were drawn in)."""
        return [i for i in range(node + 1, len(self)) if self._parents[i] == node and not self._scouts[i]]

    def last_scouts(self) -> list[int]:
        """Scouts without children: the drafter wants the target's choices after them."""
        if not any(self._scouts):
            return []
        parents = set(self._parents)
        return [i for i in range(1, len(self)) if self._scouts[i] and i not in parents]

    def path(self, node: int) -> list[int]:
        """Nodes from the root (excluded) down to `node` (included)."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self._parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens on the path from the root (excluded) to `node`."""
        return [self._tokens[i] for i in self.path(node)]

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
        size = len(self)
        mask = np.eye(size, dtype=np.bool_)
        for node in range(1, size):
            mask[node] |= mask[self._parents[node]]
        return mask

    # -- fewer nodes: another tree, or this one if all of its nodes stay ----------------------------------------------

    def pruned(self, nodes: int) -> TokenTree:
        """The `nodes` of highest joint confidence (ties: the earlier). Raises rather than drop a sampled one."""
        return self.limited(len(self), nodes)

    def truncated(self, depth: int) -> TokenTree:
        """The nodes down to `depth`. This does not depend on tokens, so sampled nodes may be dropped too."""
        return self.limited(depth, len(self))

    def limited(self, depth: int, nodes: int) -> TokenTree:
        """`truncated`, then `pruned`: the best `nodes` of those down to `depth`."""
        inside = [node for node, level in enumerate(self._depths) if level <= depth]
        if len(inside) - 1 <= nodes:
            return self if len(inside) == len(self) else self.subtree(inside)
        if self.sampled:
            raise DraftFault(f"{len(inside) - 1} nodes were sampled and {nodes} planned; none of them may be pruned")
        weakest = self._weakest_on_paths()
        best = _best([weakest[node] for node in inside], nodes)
        return self.subtree([inside[place] for place in best])

    def best_with(self, leaves: Sequence[tuple[float, int, int]], budget: int, origin: str) -> TokenTree:
        """A new tree: the best `budget` of these nodes and of leaves below them (joint confidence, parent, token).

        All are chosen; each leaf is new and unique.
        """
        weakest = self._weakest_on_paths()
        weakest += [min(weakest[parent], joint) for joint, parent, _ in leaves]
        best, size = _best(weakest, budget), len(self)
        nodes = [node for node in best if node < size]
        tree, places = self.subtree(nodes), {node: place for place, node in enumerate(nodes)}
        for leaf in best[len(nodes) :]:
            joint, parent, token = leaves[leaf - size]
            tree.add(places[parent], token, origin=origin, confidence=joint)
        return tree

    def copy(self) -> TokenTree:
        """Another tree of the same nodes, without `prepared`."""
        return self.subtree(range(len(self)))

    def _weakest_on_paths(self) -> list[float]:
        """The lowest confidence on the path to each node: never above the parent's, so the best nodes are connected."""
        weakest = [math.inf]
        for node in range(1, len(self)):
            above, own = weakest[self._parents[node]], self._confidence[node]
            weakest.append(own if own < above else above)
        return weakest

    def subtree(self, indices: Iterable[int]) -> TokenTree:
        """The nodes at these indices, in ascending order with the root; one whose parent is missing is left out."""
        places: dict[int, int] = {}
        for node in indices:
            if node == 0 or self._parents[node] in places:
                places[node] = len(places)
        smaller = TokenTree(self._tokens[0])
        smaller._tokens = [self._tokens[node] for node in places]
        smaller._parents = [places.get(self._parents[node], -1) for node in places]
        smaller._depths = [self._depths[node] for node in places]
        smaller._origins = [self._origins[node] for node in places]
        smaller._confidence = [self._confidence[node] for node in places]
        smaller._scouts = [self._scouts[node] for node in places]
        smaller._draws = [self._draws[node] for node in places]
        smaller._child = children_of(smaller._parents, smaller._tokens, smaller._scouts)
        return smaller

    def check(self, root_token: int, vocab_size: int) -> None:
        """Raise DraftFault unless the engine can verify this tree: one that `add` could have made."""
        index = check_columns(_columns(self), root_token, vocab_size)
        if type(self._child) is not dict or index != self._child:
            raise DraftFault("the children of a drafted tree are not those of its tokens and parents")
        self._child = index  # equal, with plain ints
        if self.prepared is not None and not (
            type(self.prepared) is Prepared and len(self.prepared.hidden) == len(self._tokens)
        ):
            raise DraftFault("the prepared part of a drafted tree belongs to another tree")


def _best(confidence: Sequence[float], budget: int) -> list[int]:
    """The root and the `budget` nodes of highest confidence (ties: the earlier one), in index order."""
    order = sorted(range(1, len(confidence)), key=confidence.__getitem__, reverse=True)  # stable in reverse, too
    return [0, *sorted(order[: max(0, budget)])]


_columns = operator.attrgetter(*(f"_{name}" for name in KINDS))
