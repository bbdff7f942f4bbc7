"""Trees from guesses that depend on the depth and not on the parent: every node of a depth has the same candidates
below.

The probability of a path is the product of its candidates' probabilities, so a node is never likelier than its parent.
Best-first growth therefore gives the best tree of every size on the way.
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

    `tokens` and `probabilities`: the candidates of each depth, the likeliest first. The root is node 0, the first of
    the list node 1; parents come before their children. Paths with a joint probability of 0 or below `min_confidence`
    are left out.
    """
    found: list[tuple[int, int, float]] = []
    waiting: list[tuple[float, int, int, int]] = []  # (-joint, parent, depth, rank among the candidates)
    joints = [1.0]

    def consider(parent: int, depth: int, place: int) -> None:
        if depth < len(tokens) and place < len(tokens[depth]):
            joint = joints[parent] * probabilities[depth][place]
            if math.isnan(joint):
                raise DraftFault("the draft's probabilities are not finite")
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
