"""The drafters of an engine, and the guard around them: a draft may fail or be slow, a request may not."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import TypeVar
from weakref import WeakSet

from slipstream.drafters import DraftRequest, Outcome
from slipstream.drafters.guard.faults import proposals, tell
from slipstream.drafters.guard.stopwatch import KEPT, Stopwatch
from slipstream.drafters.registry import AnyDrafter
from slipstream.errors import DraftFault
from slipstream.policy import DraftCall
from slipstream.sequence import PLAIN, Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

log = logging.getLogger("slipstream")
T = TypeVar("T")


class DrafterSet(Mapping[str, AnyDrafter]):
    """Drafters by name. A drafter that fails on a request is dropped for that request only."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._drafters: dict[str, AnyDrafter] = {}
        self._watches: dict[str, Stopwatch] = {}
        self._asked: WeakSet[Sequence] = WeakSet()  # sequences for which a drafter was called
        self._passes: deque[float] = deque(maxlen=KEPT)  # milliseconds of the target's last passes without prompts
        self.faults: Counter[str] = Counter()  # by drafter

    def __getitem__(self, name: str) -> AnyDrafter:
        return self._drafters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._drafters)

    def __len__(self) -> int:
        return len(self._drafters)

    def add(self, name: str, drafter: AnyDrafter) -> None:
        """Add a drafter under an unused name."""
        self._drafters[name] = drafter
        self._watches[name] = Stopwatch()

    def remove(self, name: str) -> AnyDrafter:
        """Remove a drafter that no sequence uses."""
        del self.faults[name], self._watches[name]
        return self._drafters.pop(name)

    def of(self, sequence: Sequence) -> AnyDrafter:
        """The drafter of a sequence."""
        return self._drafters[sequence.drafter]

    def taps(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """The layers whose hidden states the drafters of these sequences read."""
        names = {sequence.active_drafter for sequence in sequences}
        return tuple(sorted({layer for name in names for layer in self._drafters[name].taps}))

    def scratch_rows(self, sequence: Sequence, plan: Plan) -> int:
        """Slots below the root that a draft may write in any store; 0 if there is no drafter or it fails to say."""
        if sequence.active_drafter == PLAIN:
            return 0
        rows = self.guarded(sequence, lambda: max(plan.nodes, self.of(sequence).scratch_rows(plan)))
        return rows or 0

    # -- a step -------------------------------------------------------------------------------------------------------

    def propose(self, requests: list[DraftRequest]) -> dict[Sequence, TokenTree]:
        """The drafters' trees, checked; sequences for which nothing was drafted have none."""
        asking = [request for request in requests if request.plan.drafts and request.sequence.active_drafter != PLAIN]
        trees: dict[Sequence, TokenTree] = {}
        for name in dict.fromkeys(request.sequence.drafter for request in asking):
            mine = [request for request in asking if request.sequence.drafter == name]
            for request, tree in zip(mine, self._offers(name, mine), strict=True):
                if tree is not None:
                    checked = self.guarded(request.sequence, lambda w=request, t=tree: self._checked(w, t))  # type: ignore[misc]
                    if checked is not None:
                        trees[request.sequence] = checked
        return trees

    def take_calls(self) -> list[DraftCall]:
        """The calls, since the last time, of drafters whose parts are planned apart."""
        return [call for drafter in self._drafters.values() if drafter.parts for call in drafter.take_calls()]

    def _offers(self, name: str, requests: list[DraftRequest]) -> list[TokenTree | None]:
        """The trees of one drafter; None for sequences on which it failed. A drafter that is too slow is dropped."""
        began = time.perf_counter()
        offers = proposals(self._drafters[name], requests, self.drop)
        seconds = time.perf_counter() - began
        fresh = not self._asked.issuperset(request.sequence for request in requests)  # it may include a prefill
        self._asked.update(request.sequence for request in requests)
        depth = max(request.plan.depth for request in requests)
        pass_ms = median(self._passes) if self._passes else None
        if self._watches[name].took(1000 * seconds, depth=depth, pass_ms=pass_ms, fresh=fresh):
            for request in requests:
                self.drop(request.sequence, DraftFault(f"a draft took {seconds:.1f} s"))
        return offers

    def passed(self, milliseconds: float) -> None:
        """What a pass of the target without prompts took: calls of drafters are judged by it."""
        self._passes.append(milliseconds)

    def _checked(self, request: DraftRequest, tree: TokenTree) -> TokenTree:
        """The tree without the nodes that a grammar forbids, after a check."""
        tree.check(request.sequence.tokens[-1], self._vocab_size)
        constraint = request.sequence.constraint
        return tree if constraint is None else constraint.pruned(tree)

    def observe(self, outcomes: list[Outcome]) -> None:
        """Report the verified results to each drafter, including those of finished sequences."""
        followed = [outcome for outcome in outcomes if outcome.sequence.active_drafter != PLAIN]
        for name in dict.fromkeys(outcome.sequence.drafter for outcome in followed):
            drafter = self._drafters[name]
            mine = [outcome for outcome in followed if outcome.sequence.drafter == name]
            tell(drafter, [outcome for outcome in mine if not outcome.sequence.finished], self.drop)
            for outcome in mine:
                if outcome.sequence.finished:
                    self.guarded(outcome.sequence, lambda o=outcome, d=drafter: d.depart(o))  # type: ignore[misc]

    def close(self, sequence: Sequence) -> None:
        """Release the drafter's state of a sequence."""
        self.guarded(sequence, lambda: self.of(sequence).close(sequence))

    # -- drafts may fail; requests may not ----------------------------------------------------------------------------

    def guarded(self, sequence: Sequence, action: Callable[[], T]) -> T | None:
        """Run `action`; if it fails, drop the drafter for this sequence."""
        try:
            return action()
        except Exception as error:
            self.drop(sequence, error)
            return None

    def drop(self, sequence: Sequence, error: Exception) -> None:
        """Continue a request without its drafter, after an error."""
        sequence.dropped.add(sequence.drafter)
        sequence.stats.draft_faults += 1
        self.faults[sequence.drafter] += 1
        log.warning(
            "drafter %r failed on request %s and is dropped for it: %s", sequence.drafter, sequence.request.id, error
        )
