"""Which sequences run in the next step, and how many rows of their prompts.

By priority; then first come, first served. Decoding sequences always run; prompts are fed in chunks that end at page
boundaries, so that a long prompt does not delay the others. When pages run out, the youngest sequence of the lowest
priority is preempted: its pages are copied out, and it is the first of its priority to resume.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.errors import CacheFull
from slipstream.sequence import Sequence, Work


class Scheduler:
    """Waiting, running and preempted sequences."""

    def __init__(self, cache: PagedCache, max_sequences: int, prompt_rows: int) -> None:
        self._cache = cache
        self.max_sequences = max_sequences
        self.prompt_rows = prompt_rows  # prefill rows per step
        self.waiting: deque[Sequence] = deque()  # by priority, then by arrival
        self.running: list[Sequence] = []  # oldest first
        self.pinned: set[Sequence] = set()  # a device writes to their pages: they are not preempted
        self.preemptions = 0  # since the start

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the choices of one request."""
        mine = sequences[0].request.priority
        behind = sum(1 for _ in takewhile(lambda other: other.request.priority > mine, reversed(self.waiting)))
        for sequence in sequences:
            self.waiting.insert(len(self.waiting) - behind, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.saved = None
        self._cache.release(sequence.table)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence waits, runs or is preempted here."""
        return sequence in self.running or sequence in self.waiting

    @property
    def idle(self) -> bool:
        """Whether there are no sequences."""
        return not (self.waiting or self.running)

    def next(self) -> list[Work]:
        """The work of the next step."""
        self._admit()
        work: list[Work] = []
        rows = self.prompt_rows
        for sequence in self.running:
            pending = sequence.tokens[sequence.cached :]
            if len(pending) > 1:
                pending = pending[: self._chunk(sequence.cached, len(pending), rows)]
                rows -= len(pending)
            if pending:
                work.append(Work(sequence, pending))
        return work

    @staticmethod
    def _chunk(start: int, length: int, rows: int) -> int:
        """How many pending tokens to feed: all, or up to the last page boundary that the budget reaches."""
        if length <= rows:
            return length
        return max(0, (start + rows) // PAGE_SIZE * PAGE_SIZE - start)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            if not self._give_pages(sequence):
                return
            self.waiting.popleft()
            self.running.append(sequence)

    def _give_pages(self, sequence: Sequence) -> bool:
        """Open, fork or restore the sequence's pages; False if it must wait."""
        try:
            if sequence.saved is not None:
                sequence.table = self._cache.restore(sequence.saved)
                sequence.saved = None
                return True
            first = self._first_choice(sequence)
            prompt = sequence.request.prompt_ids
            if first is None:
                # A prompt that is scored must be computed, even if it is cached.
                found = prompt if sequence.params.prompt_logprobs is None else []
                sequence.table = self._cache.open(found, sequence.needs)
                # Without room for the whole prompt it would be preempted again at once.
                if -(-(len(prompt) + 1) // PAGE_SIZE) - len(sequence.table.pages) > self._cache.available:
                    self._cache.release(sequence.table)
                    return not self.running and self._open_alone(sequence)
                sequence.found = sequence.cached
                return True
            if first.cached < len(prompt) - 1:
                return False  # share the prompt once it has been fed
            sequence.table = self._cache.fork(first.table, len(prompt) - 1)
            sequence.found = first.found
            return True
        except CacheFull:
            return False

    def _open_alone(self, sequence: Sequence) -> bool:
        """No other sequence runs: give this one all pages that are free."""
        found = sequence.request.prompt_ids if sequence.params.prompt_logprobs is None else []
        sequence.table = self._cache.open(found, sequence.needs)
        sequence.found = sequence.cached
        return True

    def _first_choice(self, sequence: Sequence) -> Sequence | None:
        """The running sequence of the same request, and therefore of the same prompt."""
        if sequence.params.n == 1:  # there is no other; batches may be large
            return None
        return next((other for other in self.running if other.request is sequence.request), None)

    def reserve(self, work: list[Work], rows: dict[Sequence, int]) -> list[Work]:
        """Reserve `rows[sequence]` slots for each; preempts the youngest sequences if pages run out."""
        kept = {item.sequence: item for item in work}
        for item in work:
            while item.sequence in kept:
                try:
                    self._cache.reserve(item.sequence.table, rows[item.sequence])
                    break
                except CacheFull:
                    last = self._last()
                    if last is item.sequence and len(self.running) == 1:
                        raise
                    self._preempt(last)
                    kept.pop(last, None)
        return list(kept.values())

    def _last(self) -> Sequence:
        """The youngest running sequence of the lowest priority that may be preempted."""
        free = (sequence for sequence in reversed(self.running) if sequence not in self.pinned)
        return max(free, key=lambda sequence: sequence.request.priority)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.saved = self._cache.save(sequence.table)
        mine = sequence.request.priority
        before = sum(1 for _ in takewhile(lambda other: other.request.priority < mine, self.waiting))
        self.waiting.insert(before, sequence)
        self.preemptions += 1
