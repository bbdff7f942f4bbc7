"""`lookahead`: the target guesses the next positions itself, in the same pass in which it verifies.

Every pass contains a window of guesses as scouts. The target's choices after them are better guesses for the positions
that follow (Jacobi iteration), and each column of the window yields an N-gram: its tokens and the target's choice after
them. N-grams that begin with the last token of the text are the draft. No second model, no training.

A sampled token depends on the noise of its position. The scouts use that noise too, so a window converges to this
request's own output at any temperature.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count, islice

from slipstream import noise
from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest, Outcome
from slipstream.errors import OptionError
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

Gram = tuple[int, ...]


@dataclass(frozen=True)
class LookaheadOptions(DraftOptions):
    """`window`: positions guessed at once. `ngram`: length of the N-grams. `guesses`: N-grams verified per step.
    `pool`: N-grams kept per sequence. The plan is what these need; `depth` and `nodes` (0: no bound) and `branch` are
    upper bounds.
    """

    depth: int = 0
    nodes: int = 0
    branch: int = 192
    window: int = 5
    ngram: int = 4
    guesses: int = 5
    pool: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.min_confidence == 0.0, "min_confidence", "0: `lookahead` has no estimate of its own")
        self.require(self.window >= 1, "window", "1 or more")
        self.require(self.ngram >= 3, "ngram", "3 or more: a column has a first token and one below it at least")
        self.require(self.guesses >= 1, "guesses", "1 or more")
        self.require(self.pool >= self.guesses, "pool", f"guesses ({self.guesses}) or more")
        plan = self.plan
        if plan.nodes > 192:
            shape = f"window={self.window}, ngram={self.ngram} and guesses={self.guesses}"
            hint = "(window + guesses) * (ngram - 1) may be 192 at most"
            raise OptionError(f"{shape} need {plan.nodes} nodes", hint=hint)
        for name, needed, formula in (
            ("nodes", plan.nodes, "(window + guesses) * (ngram - 1)"),
            ("depth", plan.depth, "window + ngram - 2"),
        ):
            given = getattr(self, name)
            self.require(given == 0 or given >= needed, name, f"0, or {formula} = {needed} and more")

    @property
    def plan(self) -> Plan:
        """Room for all guesses and the whole window."""
        nodes = (self.window + self.guesses) * (self.ngram - 1)
        return Plan(self.window + self.ngram - 2, nodes, min(self.branch, self.guesses))


class NgramPool:
    """N-grams by their first token. Above `limit`, the least recently seen is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_age: OrderedDict[Gram, None] = OrderedDict()
        self._by_first: dict[int, dict[Gram, None]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, gram: Gram) -> bool:
        return gram in self._by_age

    def add(self, gram: Gram) -> None:
        """Keep an N-gram as the newest."""
        self._discard(gram)
        self._by_age[gram] = None
        self._by_first.setdefault(gram[0], {})[gram] = None
        if len(self._by_age) > self._limit:
            self._discard(next(iter(self._by_age)))

    def _discard(self, gram: Gram) -> None:
        if gram not in self._by_age:
            return
        del self._by_age[gram]
        alike = self._by_first[gram[0]]
        del alike[gram]
        if not alike:
            del self._by_first[gram[0]]

    def after(self, first: int, most: int) -> list[Gram]:
        """N-grams that begin with `first`, the newest first."""
        return list(islice(reversed(self._by_first.get(first, {})), most))


@dataclass
class _Ahead:
    """The lookahead state of one sequence.

    A column of the window is `ngram - 1` tokens for consecutive positions, identified by the absolute position of the
    first. So the window moves with the text, whatever was emitted, pruned or taken back.
    """

    pool: NgramPool
    columns: dict[int, Gram] = field(default_factory=dict)
    read: int = 0  # tokens of the text whose N-grams were added to the pool or skipped as too old


class LookaheadDrafter(Drafter[LookaheadOptions]):
    """Draft from the target's own guesses of earlier steps."""

    name = "lookahead"
    summary = "lookahead decoding: the target guesses the next positions in the pass that verifies"
    helps = "any text, without a second model, if extra rows are nearly free (one request on a GPU); seldom on a CPU"
    cost = "window * (ngram - 1) rows of every pass besides the guesses; when sampling, one more choice per column"
    options_type = LookaheadOptions

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._one(request.sequence, request.plan) for request in requests]

    def _one(self, sequence: Sequence, plan: Plan) -> TokenTree:
        ahead: _Ahead = sequence.drafting.setdefault(self.key, _Ahead(NgramPool(self.options.pool)))
        self._read(ahead, sequence)
        tree = TokenTree(sequence.tokens[-1])
        self._add_guesses(tree, ahead.pool, plan)
        self._add_window(tree, ahead, sequence, plan)
        return tree

    def _read(self, ahead: _Ahead, sequence: Sequence) -> None:
        """Add the text's own N-grams to the pool; of a long prompt only as many as fit."""
        size = self.options.ngram
        end = sequence.settled - size + 1
        for start in range(max(ahead.read, end - self.options.pool), end):
            ahead.pool.add(tuple(sequence.tokens[start : start + size]))
        ahead.read = max(ahead.read, end)

    def _add_guesses(self, tree: TokenTree, pool: NgramPool, plan: Plan) -> None:
        """The newest N-grams after the root, merged where they share a prefix.

        Confidence is a rule of thumb, to compare these nodes with those of other drafters: the newest N-gram's first
        token counts as right one time in three, older N-grams and deeper tokens less.
        """
        for rank, gram in enumerate(pool.after(tree.tokens[0], self.options.guesses), start=1):
            node, confidence = 0, 1.0 / (3 * rank)
            for token in gram[1 : plan.depth + 1]:
                is_new = tree.child(node, token) is None
                if is_new and (len(tree) > plan.nodes or len(tree.children(node)) >= plan.branch):
                    break
                node = tree.add(node, token, origin=self.name, confidence=confidence)
                confidence /= 2

    # -- the window ---------------------------------------------------------------------------------------------------

    def _add_window(self, tree: TokenTree, ahead: _Ahead, sequence: Sequence, plan: Plan) -> None:
        """First tokens as a chain below the root, the rest of each column below its own first token.

        Only whole columns are added, as many as the plan has room for. Their confidence is 0, so that pruning keeps
        guesses before scouts, and of these the first columns (equals are kept in index order).
        """
        below = self.options.ngram - 2
        room = (plan.nodes + 1 - len(tree)) // (below + 1)
        first = len(sequence.tokens)
        spine = 0
        for position in range(first, first + min(self.options.window, room, plan.depth - below)):
            if position not in ahead.columns:
                ahead.columns[position] = self._fresh(ahead, sequence, position)
            head, *rest = ahead.columns[position]
            spine = node = self._add_scout(tree, spine, head)
            for token in rest:
                node = self._add_scout(tree, node, token)

    def _add_scout(self, tree: TokenTree, parent: int, token: int) -> int:
        return tree.add(parent, token, origin=self.name, confidence=0.0, scout=True)

    def _fresh(self, ahead: _Ahead, sequence: Sequence, position: int) -> Gram:
        """A column for a position new to the window: the neighbour's tokens from here on, and one that is likely to
        follow them; without a neighbour, tokens of the text. Random numbers depend on the position alone, so the drafts
        of a request are reproducible in any batch.
        """

        def any_token(row: int) -> int:
            return sequence.tokens[noise.key(position, row, noise.DRAFT) % sequence.settled]

        neighbour = ahead.columns.get(position - 1)
        if neighbour is None:
            return tuple(any_token(row) for row in range(self.options.ngram - 1))
        known = ahead.pool.after(neighbour[-1], 1)
        return (*neighbour[1:], known[0][1] if known else any_token(0))

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            ahead: _Ahead | None = outcome.sequence.drafting.get(self.key)
            if ahead is not None and outcome.tree is not None:
                # A scout is identified by its path, not its index: nodes may have been added or pruned.
                said = {tuple(outcome.tree.path_tokens(scout)): token for scout, token in outcome.scouted.items()}
                self._keep(ahead.pool, said)
                self._move(ahead, outcome, said)

    def _keep(self, pool: NgramPool, said: dict[Gram, int]) -> None:
        """The end of a path and the target's choice after it make an N-gram."""
        width = self.options.ngram - 1
        for path, token in said.items():
            if len(path) >= width:
                pool.add((*path[-width:], token))

    def _move(self, ahead: _Ahead, outcome: Outcome, said: dict[Gram, int]) -> None:
        """A column that got the target's choice drops its first token, appends the choice and moves to the next
        position.

        A column without one stays. Columns that the text has reached are dropped.
        """
        sequence = outcome.sequence
        moved: dict[int, Gram] = {}
        spine: Gram = ()
        for position in count(len(sequence.tokens) - len(outcome.tokens)):
            column = ahead.columns.get(position)
            if column is None:
                break
            spine += column[:1]
            answer = said.get(spine + column[1:])
            if answer is not None:
                moved[position + 1] = (*column[1:], answer)
        in_sight = range(sequence.settled, len(sequence.tokens) + self.options.window)
        ahead.columns = {place: column for place, column in (ahead.columns | moved).items() if place in in_sight}
