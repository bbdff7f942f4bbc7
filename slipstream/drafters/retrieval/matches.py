"""From a match to a tree: what followed the longest known suffix of a text, grown best-first.

A text memory (an automaton, a corpus on disk) gives a `Match`, the state of a text in it. The growth is the same for
all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.tree import TokenTree
from slipstream.types import Plan

# What followed a state: (token, count, next state), in any order.
Following: TypeAlias = list[tuple[int, int, Any]]


@dataclass(frozen=True)
class Match:
    """The longest suffix of a text that a memory contains: its length, its state, and what followed a state."""

    length: int
    state: Any
    following: Callable[[Any], Following]


def grow(tree: TokenTree, match: Match, plan: Plan, origin: str) -> None:
    """Best-first: always extend the open node of highest estimated joint probability.

    Adds as many nodes as planned; some may already be in the tree.
    """
    grown = 0
    open_nodes = [(-1.0, 0, 0, match.state, match.length)]  # ties: first found
    while open_nodes and grown < plan.nodes:
        joint, _, node, state, matched = heapq.heappop(open_nodes)
        if tree.depths[node] >= plan.depth:
            continue
        for token, probability, next_state in _estimates(match.following(state), matched)[: plan.branch]:
            confidence = -joint * probability
            if confidence < plan.min_confidence or grown >= plan.nodes:
                break
            grown += 1
            child = tree.add(node, token, origin=origin, confidence=confidence)
            heapq.heappush(open_nodes, (-confidence, grown, child, next_state, matched + 1))


def _estimates(following: Following, matched: int) -> list[tuple[int, float, Any]]:
    """(token, estimated probability, state), most frequent first.

    Short matches are often coincidences, so each estimate reserves a share for 'something new', which shrinks with the
    length of the match and with the evidence.
    """
    total = sum(count for _, count, _ in following) + 2.0 / matched
    ranked = sorted(following, key=lambda seen: (-seen[1], seen[0]))
    return [(token, count / total, state) for token, count, state in ranked]
