"""Whether the columns of a drafted tree form a tree that can be verified.

Uses built-in loops where possible: this runs for every sequence in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from slipstream.draw import Draw
from slipstream.errors import DraftFault

MOST_NODES = 4096  # far above any plan: stops a drafter that never stops adding

# The columns of a tree, an item for each node, and the types that items may have, subclasses excluded.
KINDS: dict[str, set[type]] = {
    "tokens": {int},
    "parents": {int},
    "depths": {int},
    "origins": {str, type(None)},
    "confidence": {float},
    "scouts": {bool},
    "draws": {Draw, type(None)},
}
Index = dict[tuple[int, int], int]


def children_of(parents: Sequence[int], tokens: Sequence[int], scouts: Sequence[bool]) -> Index:
    """(parent, token) -> the child that may be accepted."""
    nodes = enumerate(zip(parents, tokens, scouts, strict=True))
    return {(parent, token): node for node, (parent, token, scout) in nodes if node and not scout}


def check_columns(columns: Sequence[list[Any]], root_token: int, vocab_size: int) -> Index:
    """Raise DraftFault unless the columns, in the order of KINDS, form a tree; returns the index of its children."""
    sizes = {len(column) if type(column) is list else -1 for column in columns}
    if len(sizes) > 1 or not 1 <= (size := sizes.pop()) <= MOST_NODES:
        raise DraftFault(f"the columns of a drafted tree are no lists of one length, 1 to {MOST_NODES}")
    for (name, kinds), column in zip(KINDS.items(), columns, strict=True):
        if not kinds.issuperset(map(type, column)):
            valid = " or ".join(sorted(kind.__name__ for kind in kinds))
            raise DraftFault(f"the {name} of a drafted tree are not all of type {valid}")
    root, *state = (column[0] for column in columns)
    if root != root_token:
        raise DraftFault(f"the root is token {root}, but the last committed token is {root_token}")
    if state != [-1, 0, None, 1.0, False, None]:
        raise DraftFault("the root of a drafted tree is treated as a guess")
    tokens, parents, depths, _, confidences, scouts, draws = columns
    guesses, above = tokens[1:], parents[1:]
    if guesses and not 0 <= min(guesses) <= max(guesses) < vocab_size:
        wrong = next(token for token in guesses if not 0 <= token < vocab_size)
        raise DraftFault(f"drafted token {wrong} is outside the vocabulary of {vocab_size}")
    if min(above, default=0) < 0 or any(map(operator.ge, above, range(1, size))):
        raise DraftFault("a drafted node's parent does not come before it")
    if depths != [0, *(depths[parent] + 1 for parent in above)]:
        raise DraftFault("a drafted node is not one deeper than its parent")
    for confidence in confidences:
        if not 0.0 <= confidence <= 1.0 + 1e-6:  # NaN fails too
            raise DraftFault(f"a drafted node has confidence {confidence}")
    if True in scouts and any(scouts[parents[node]] and not scouts[node] for node in range(1, size)):
        raise DraftFault("a node that may be accepted is below a scout")
    index = children_of(parents, tokens, scouts)
    if len(index) != size - 1 - sum(scouts):
        raise DraftFault("children of one drafted node have the same token")
    if any(draw is not None for draw in draws):
        _check_draws(index, draws, vocab_size)
    return index


def _check_draws(index: Index, draws: Sequence[Draw | None], vocab_size: int) -> None:
    """A q that is no distribution, or not the one its nodes were drawn from, would bias the output unnoticed."""
    families: dict[int, list[tuple[int, Draw | None]]] = {}
    for (parent, token), node in index.items():
        families.setdefault(parent, []).append((token, draws[node]))
    for siblings in families.values():
        draw = siblings[0][1]
        if any(other is not draw for _, other in siblings):
            raise DraftFault("siblings must all be chosen, or all be drawn from one distribution")
        if draw is not None:
            draw.check([token for token, _ in siblings], vocab_size)
