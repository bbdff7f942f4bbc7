"""Trees from guesses that know their place and not their parent: the same candidates hang below every node of a depth.

A path is worth the product of its candidates' probabilities, and a node is never worth more than its parent. So taking
the best node whose parent is there, again and again, gives the best tree of every size on the way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from slipstream.errors import DraftFault


def best_first(
    tokens: Sequence[Sequence[int]], probabilities: Sequence[Sequence[float]], nodes: int, min_confidence: float = 0.0
) -> list[tuple[int, int, float]]:
    """The `nodes` most probable nodes as (parent, token, joint probability), the best first.

    `tokens` and `probabilities` hold the candidates of each depth, the likeliest first. The root is node 0, and the
    first of the list node 1, so that parents come before their children. A path without hope (a joint probability of 0,
    or under `min_confidence`) is left out.
    """
    found: list[tuple[int, int, float]] = []
    waiting: list[tuple[float, int, int, int]] = []  # (-joint, parent, depth, place among the candidates)
    joints = [1.0]

    def consider(parent: int, depth: int, place: int) -> None:
        if depth < len(tokens) and place < len(tokens[depth]):
            joint = joints[parent] * probabilities[depth][place]
            if math.isnan(joint):
                raise DraftFault("a draft has no probabilities: its numbers are not finite")
            if joint > 0.0 and joint >= min_confidence:
                heapq.heappush(waiting, (-joint, parent, depth, place))

    consider(0, 0, 0)
    while waiting and len(found) < nodes:
        lost, parent, depth, place = heapq.heappop(waiting)
        found.append((parent, tokens[depth][place], -lost))
        joints.append(-lost)
        consider(parent, depth, place + 1)  # the next best sibling
        consider(len(found), depth + 1, 0)  # the best child
    return found
