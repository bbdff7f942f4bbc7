"""What a grammar allows after any path below a sequence's last token.

A constraint is a function of the output and of the path. Its matcher moves to the path and is rolled back, so a
rejected branch leaves no trace: the next query starts from what was emitted. Consuming a token and rolling it back
takes about a microsecond, a mask over 49,152 tokens about ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.errors import OptionError
from slipstream.tree import TokenTree

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Constraint:
    """The position of one sequence in its grammar. `output`: the tokens it has emitted, a list that only grows.

    Where the grammar is complete, the end tokens are allowed; after one of them, only end tokens. After a path that
    the grammar does not allow, nothing is constrained: no such path is ever accepted.
    """

    def __init__(self, matcher: LLMatcher, output: Sequence[int], ends: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._output = output
        self._ends = ends
        self._vocab_size = vocab_size
        self._settled = 0  # tokens of the output that the matcher has consumed
        self._tail: list[int] = []  # tokens that it has consumed after those
        self._foreseen: dict[tuple[int, ...], npt.NDArray[np.bool_] | None] = {}  # by tokens emitted, and the path

    def following(self, output: Sequence[int]) -> Constraint:
        """A separate constraint for another sequence whose output begins with this one's."""
        twin = Constraint(self._matcher.deep_copy(), output, self._ends, self._vocab_size)
        twin._settled, twin._tail = self._settled, list(self._tail)
        return twin

    # -- at a node ----------------------------------------------------------------------------------------------------

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `path`: whether it is in the mask, without computing one."""
        if not self._move(path):
            return True
        if self._ended(path) or token in self._ends:
            return token in self._ends and (self._ended(path) or self._matcher.is_accepting())
        forced = self._matcher.compute_ff_tokens()
        if forced:  # bytes that the grammar forces have one spelling
            return token == forced[0]
        allowed = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        if allowed:  # the next query is most likely about a path through it
            self._tail.append(token)
        return allowed

    def forbidden(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """Which tokens may not follow `path`, [vocab]; None if the path itself is outside the grammar."""
        place = (len(self._output), *path)
        if place in self._foreseen:
            return self._foreseen[place]
        return ~self._allowed(path) if self._move(path) else None

    def foresee(self, tree: TokenTree, there_is_time: Callable[[], bool]) -> None:
        """Make the masks of the nodes now, while there is time: `forbidden` has them until a token is emitted."""
        self._foreseen = {}
        for node in range(len(tree)):
            if not there_is_time():
                return
            path = tree.path_tokens(node)
            self._foreseen[len(self._output), *path] = self.forbidden(path)

    def few(self, path: Sequence[int], most: int) -> list[int]:
        """The tokens that may follow `path` if there are `most` of them or fewer; else none. Nothing follows an end."""
        if not self._move(path) or self._ended(path):
            return []
        allowed = self._allowed(path)
        return np.flatnonzero(allowed).tolist() if np.count_nonzero(allowed) <= most else []

    def forced(self, path: Sequence[int]) -> list[int]:
        """Tokens that must follow `path`, each the only one allowed at its place; empty where there is a choice."""
        if not self._move(path) or self._ended(path):
            return []
        forced = self._matcher.compute_ff_tokens()
        self._check()
        return forced

    def pruned(self, tree: TokenTree) -> TokenTree:
        """The nodes that the grammar allows. Sampled nodes all stay: dropping one by its token would bias the output;
        verification rejects what is forbidden. So do scouts, which are never accepted.
        """
        if len(tree) == 1 or tree.sampled:
            return tree
        below: list[list[int]] = [[] for _ in tree.tokens]
        for node in range(1, len(tree)):
            below[tree.parents[node]].append(node)
        kept, stack = [0], below[0][::-1]
        while stack:  # depth first: the matcher goes back as little as possible
            node = stack.pop()
            if tree.scouts[node] or self.allows(tree.path_tokens(tree.parents[node]), tree.tokens[node]):
                kept.append(node)
                stack += below[node][::-1]
        return tree if len(kept) == len(tree) else tree.subtree(sorted(kept))

    def _allowed(self, path: Sequence[int]) -> npt.NDArray[np.bool_]:
        """The mask after `path`, to which the matcher has moved."""
        if self._ended(path):
            allowed = np.zeros(self._vocab_size, dtype=np.bool_)
            complete = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
            complete = self._matcher.is_accepting()
            self._check()
        allowed[list(self._ends)] = complete
        return allowed

    # -- the matcher --------------------------------------------------------------------------------------------------

    def _ended(self, path: Sequence[int]) -> bool:
        """Whether an end token came before; asked for paths inside the grammar."""
        return not self._ends.isdisjoint(path) or bool(self._output and self._output[-1] in self._ends)

    def _move(self, path: Sequence[int]) -> bool:
        """Move the matcher to the output and `path` (up to an end token); False if the grammar does not allow them."""
        output, fresh = self._output, self._output[self._settled :]
        wanted = [*fresh, *path]
        text = wanted[: next((i for i, token in enumerate(wanted) if token in self._ends), len(wanted))]
        same = next((i for i, (a, b) in enumerate(zip(self._tail, text, strict=False)) if a != b), None)
        same = min(len(self._tail), len(text)) if same is None else same
        if same < len(self._tail):
            self._matcher.rollback(len(self._tail) - same)
            self._check()
            del self._tail[same:]
        if same < len(text):
            consumed = self._matcher.try_consume_tokens(text[same:])
            self._check()
            self._tail += text[same : same + consumed]
        inside = len(self._tail) == len(text) and (len(text) == len(wanted) or self._matcher.is_accepting())
        emitted = min(len(fresh), len(self._tail))
        self._settled = len(output) - len(fresh) + emitted
        del self._tail[:emitted]
        return inside and self._ends.issuperset(wanted[len(text) :])

    def _check(self) -> None:
        """Raise the matcher's error, if it has one: a limit that the grammar exceeds ends its own request."""
        if self._matcher.is_error():
            raise OptionError(f"structured_outputs: {_line(self._matcher.get_error())}")


def _line(message: str) -> str:
    """The first line of an error message of llguidance."""
    return message.strip().partition("\n")[0] or "the grammar cannot be followed"
