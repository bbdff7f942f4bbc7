"""A segment: the rows of one sequence in a ragged pass, and what each of them may see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.cache import PageTable
from slipstream.tree import Prepared, TokenTree


@dataclass(frozen=True)
class Segment:
    """New rows of one sequence.

    The rows go to the slots after `committed + earlier`: `earlier` rows of the open tree were written by previous
    passes (a draft model grows its tree level by level) and may be read. Every committed row is visible to every new
    row; `visible` says which open rows are, [new rows, earlier + new rows].
    """

    table: PageTable
    committed: int
    tokens: list[int]
    open_positions: npt.NDArray[np.int64]  # absolute positions of all open rows: earlier ones first, then the new
    visible: npt.NDArray[np.bool_]
    logits_from: int  # the first new row whose logits are needed; len(tokens) for none
    prepared: Prepared | None = None  # the rows have already been through the first layers
    causal: bool = False  # a chain after the committed rows: each row is at its position and sees all before it

    @property
    def rows(self) -> int:
        """The number of new rows."""
        return len(self.tokens)

    @property
    def earlier(self) -> int:
        """The number of open rows that earlier passes wrote."""
        return len(self.open_positions) - len(self.tokens)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Absolute positions of the new rows."""
        return self.open_positions[self.earlier :]

    @property
    def paths(self) -> list[list[int]] | None:
        """Slots of the open rows that each new row sees, its own last; None: all up to its own."""
        if self.causal:
            return None
        return [(self.committed + line.nonzero()[0]).tolist() for line in self.visible]

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Slots of the new rows."""
        return np.arange(self.first_slot, self.first_slot + self.rows, dtype=np.int64)

    @property
    def first_slot(self) -> int:
        """Slot of the first new row."""
        return self.committed + self.earlier


def chain_segment(table: PageTable, committed: int, tokens: list[int], logits_from: int) -> Segment:
    """Rows each of which sees all before it; logits from row `logits_from` on (`len(tokens)`: none)."""
    positions = np.arange(committed, committed + len(tokens), dtype=np.int64)
    return Segment(table, committed, tokens, positions, np.tri(len(tokens), dtype=np.bool_), logits_from, causal=True)


def tree_segment(
    table: PageTable,
    committed: int,
    pending: list[int],
    tree: TokenTree | None,
    first_node: int = 0,
) -> Segment:
    """The rows of `pending` (a chain of known tokens, the last of which is the root) and of the tree below it.

    `tree=None`: a chunk of a prompt, nothing to accept, no logits. `first_node` > 0: nodes before it (and `pending`)
    were written by earlier passes; only the nodes from there on are new.
    """
    lead = len(pending)
    if tree is None:
        return chain_segment(table, committed, pending, lead)
    if first_node == 0 and tree.is_chain:
        return chain_segment(table, committed, [*pending, *tree.tokens[1:]], lead - 1)
    # The root is both the last pending row and node 0, so node i is i rows after it.
    root, nodes = lead - 1, len(tree)
    chain = np.arange(committed, committed + lead, dtype=np.int64)
    depths = np.asarray(tree.depths[1:], dtype=np.int64)
    positions = np.concatenate([chain, chain[-1] + depths])
    visible = np.zeros((root + nodes, root + nodes), dtype=np.bool_)
    visible[:lead, :lead] = np.tri(lead, dtype=np.bool_)
    visible[lead:, :root] = True
    visible[root:, root:] = tree.ancestor_mask()
    if first_node == 0:
        return Segment(table, committed, [*pending, *tree.tokens[1:]], positions, visible, root)
    return Segment(table, committed, list(tree.tokens[first_node:]), positions, visible[root + first_node :], 0)
