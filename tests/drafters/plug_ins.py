"""Drafters as other packages would bring them: healthy ones, and ones that do what no drafter should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from slipstream.drafters import Drafter, DraftOptions, DraftRequest, Outcome, registry
from slipstream.drafters.ngram import NgramDrafter
from slipstream.tree import TokenTree


class Healthy(Drafter[DraftOptions]):
    """Guesses that the last four tokens come again."""

    name = "healthy"
    summary = "the last few tokens, again"
    helps = "tests"
    cost = "nothing"
    options_type = DraftOptions

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._one(request) for request in requests]

    def _one(self, request: DraftRequest) -> TokenTree:
        tokens = request.sequence.tokens
        return TokenTree.chain(tokens[-1], (tokens[-4:] * 4)[: min(request.plan.depth, request.plan.nodes)], self.name)


class Counting(Healthy):
    """Counts its calls and keeps its outcomes with the sequence."""

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        for request in requests:
            request.sequence.drafting[self.key] = request.sequence.drafting.get(self.key, 0) + 1
        return super().propose(requests)

    seen: list[Outcome]
    closed: list[int]

    def observe(self, outcomes: Seq[Outcome]) -> None:
        self.seen = [*getattr(self, "seen", []), *outcomes]

    def close(self, sequence: Any) -> None:
        self.closed = [*getattr(self, "closed", []), sequence.drafting[self.key]]


class Sleeping(Healthy):
    """Sleeps without a way to wake it."""

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        time.sleep(30)
        return super().propose(requests)


class Looping(Healthy):
    """Never comes back."""

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        while True:
            pass


class HangingLater(Healthy):
    """Hangs in `observe`."""

    def observe(self, outcomes: Seq[Outcome]) -> None:
        while True:
            pass


class Raising(Healthy):
    """Raises what it is given."""

    error: BaseException = ValueError("of many\nlines")

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        raise self.error


class Speechless(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise SystemExit


class Meddling(Healthy):
    """Tries to change whatever it is handed."""

    refused: int

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        sequence: Any = requests[0].sequence
        self.refused = 0
        attempts: list[Any] = [
            lambda: sequence.tokens.append(1),
            lambda: sequence.tokens.__setitem__(0, 1),
            lambda: sequence.tokens.clear(),
            lambda: sequence.output_ids.append(1),
            lambda: setattr(sequence, "tokens", [1]),
            lambda: setattr(sequence, "finish_reason", "stop"),
            lambda: setattr(sequence, "remaining", 0),
            lambda: sequence.stats,
            lambda: sequence.table,
            lambda: sequence.sampler,
            lambda: self.target.cache,
            lambda: self.target.run([], []),
            lambda: setattr(self.target, "longest", 1),
        ]
        for attempt in attempts:
            try:
                attempt()
            except (AttributeError, TypeError):
                self.refused += 1
        sequence.params.logit_bias[3] = 100.0
        sequence.tokens[:].clear()
        return super().propose(requests)


class Holding(Healthy):
    """Keeps its trees and rewrites them after they are handed in, and its outcomes as well."""

    trees: tuple[TokenTree, ...] = ()

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        trees = super().propose(requests)
        self.trees = (*self.trees, *trees)
        return trees

    def observe(self, outcomes: Seq[Outcome]) -> None:
        self.rewrite()
        for outcome in outcomes:
            outcome.tokens.clear()
            if outcome.tree is not None:
                outcome.tree._tokens[:] = [0] * len(outcome.tree)

    def rewrite(self) -> None:
        """Other tokens, and children for every token."""
        for tree in self.trees:
            tree._tokens[1:] = [5] * (len(tree) - 1)
            tree._child.update({(node, token): node + 1 for node in range(len(tree) - 1) for token in range(97)})


class NumpyTokens(Healthy):
    """Guesses in numpy's numbers."""

    def _one(self, request: DraftRequest) -> TokenTree:
        tokens: Any = np.asarray(request.sequence.tokens)
        return TokenTree.chain(tokens[-1], tokens[-4:], self.name)


class Storing(Healthy):
    """Wants a store of its own."""

    def attach(self, cache: Any) -> None:
        self.cache = cache


class Derived(NgramDrafter):
    """A drafter of ours with a change: trusted like ours."""

    name = "derived"


class Returning(Healthy):
    """Returns what it is given."""

    answer: Any = None

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return self.answer(requests)  # type: ignore[no-any-return]


class Subclassed(TokenTree):
    """A tree that passes every check by its own account."""

    def check(self, root_token: int, vocab_size: int) -> None:
        pass


def endless(requests: Any) -> Iterator[TokenTree]:
    while True:
        yield TokenTree(requests[0].sequence.tokens[-1])


NONSENSE: dict[str, Any] = {
    "nothing": lambda requests: None,
    "too few": lambda requests: [],
    "too many": lambda requests: [TokenTree(w.sequence.tokens[-1]) for w in requests] * 2,
    "an array": lambda requests: np.zeros(len(requests)),
    "numbers": lambda requests: [1] * len(requests),
    "a generator": endless,
    "another root": lambda requests: [TokenTree((w.sequence.tokens[-1] + 1) % 97) for w in requests],
    "a subclass": lambda requests: [Subclassed.chain(w.sequence.tokens[-1], [10**6]) for w in requests],
}


def plug_in(kind: type[Drafter[Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a drafter of this module as a package would; its name."""
    point = EntryPoint("theirs", f"{kind.__module__}:{kind.__name__}", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    return "theirs"
