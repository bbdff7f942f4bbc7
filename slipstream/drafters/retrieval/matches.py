"""From a match to a tree: what followed the longest known suffix of a text, grown best-first.

Whoever remembers texts (an automaton, a corpus on disk) says where a text stands in what it remembers: a `Match`. The
growth below is the same for all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.tree import TokenTree
from slipstream.types import Plan

# What was seen to follow a state: (token, how often, the state behind it), in any order.
Following: TypeAlias = list[tuple[int, int, Any]]


@dataclass(frozen=True)
class Match:
    """The longest suffix of a text that some memory knows: its length, its state there, and what followed a state."""

    length: int
    state: Any
    following: Callable[[Any], Following]


def grow(tree: TokenTree, match: Match, plan: Plan, origin: str) -> None:
    """Best-first: always the open node of highest estimated joint probability."""
    open_nodes = [(-1.0, 0, match.state, match.length)]
    while open_nodes and len(tree) <= plan.nodes:
        joint, node, state, matched = heapq.heappop(open_nodes)
        if tree.depths[node] >= plan.depth:
            continue
        for token, probability, behind in _estimates(match.following(state), matched)[: plan.branch]:
            confidence = -joint * probability
            if confidence < plan.min_confidence or len(tree) > plan.nodes:
                break
            child = tree.add(node, token, origin=origin, confidence=confidence)
            heapq.heappush(open_nodes, (-confidence, child, behind, matched + 1))


def _estimates(following: Following, matched: int) -> list[tuple[int, float, Any]]:
    """(token, estimated probability, state), most frequent first.

    Short matches are often chance, so each estimate gives a share to 'something new', which shrinks with the length of
    the match and with the evidence.
    """
    total = sum(count for _, count, _ in following) + 2.0 / matched
    ranked = sorted(following, key=lambda seen: (-seen[1], seen[0]))
    return [(token, count / total, state) for token, count, state in ranked]
