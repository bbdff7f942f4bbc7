"""Which sequences run in the next step, and with how many rows of their prompts.

First come, first served. Sequences that decode always run; prompts are fed in chunks that end at page boundaries, so
that a long prompt does not hold up the others. When pages run out, the youngest sequence is set aside (its pages copied
out) and is the first to come back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.errors import CacheFull
from slipstream.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """What one sequence does in a step: `pending` known tokens to feed; if they reach the root, it also decodes."""

    sequence: Sequence
    pending: list[int]

    @property
    def decodes(self) -> bool:
        """Whether the last pending token is the last token of the sequence: its logits choose the next one."""
        return self.sequence.cached + len(self.pending) == len(self.sequence.tokens)


class Scheduler:
    """Waiting, running and set-aside sequences."""

    def __init__(self, cache: PagedCache, max_sequences: int, prompt_rows: int) -> None:
        self._cache = cache
        self._max_sequences = max_sequences
        self.prompt_rows = prompt_rows  # rows of prompts in one step
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.set_aside = 0  # how often a sequence had to make room

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the choices of one request."""
        self.waiting.extend(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished or cancelled, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.saved = None
        self._cache.release(sequence.table)

    def holds(self, sequence: Sequence) -> bool:
        """Whether it is waiting, running or set aside here."""
        return sequence in self.running or sequence in self.waiting

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
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
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            if not self._give_pages(sequence):
                return
            self.waiting.popleft()
            self.running.append(sequence)

    def _give_pages(self, sequence: Sequence) -> bool:
        """Open, fork or restore the sequence's pages; False if it has to wait."""
        try:
            if sequence.saved is not None:
                sequence.table = self._cache.restore(sequence.saved)
                sequence.saved = None
                return True
            first = self._first_choice(sequence)
            prompt = sequence.request.prompt_ids
            if first is None:
                sequence.table = self._cache.open(prompt)
                # Room for the prompt must be there, or it would be set aside again at once.
                if -(-(len(prompt) + 1) // PAGE_SIZE) - len(sequence.table.pages) > self._cache.available:
                    self._cache.release(sequence.table)
                    return not self.running and self._open_alone(sequence)
                return True
            if first.cached < len(prompt) - 1:
                return False  # its prompt is still being fed; share it when it is there
            sequence.table = self._cache.fork(first.table, len(prompt) - 1)
            return True
        except CacheFull:
            return False

    def _open_alone(self, sequence: Sequence) -> bool:
        """Nobody else runs: whatever room there is, it is this sequence's."""
        sequence.table = self._cache.open(sequence.request.prompt_ids)
        return True

    def _first_choice(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that has the same prompt because it is another choice of the same request."""
        if sequence.params.n == 1:  # there is none; and batches may be large
            return None
        return next((other for other in self.running if other.request is sequence.request), None)

    def reserve(self, work: list[Work], rows: dict[Sequence, int]) -> list[Work]:
        """Reserve `rows[sequence]` slots for each; the youngest sequences make room if there is too little."""
        kept = {item.sequence: item for item in work}
        for item in work:
            while item.sequence in kept:
                try:
                    self._cache.reserve(item.sequence.table, rows[item.sequence])
                    break
                except CacheFull:
                    youngest = self.running[-1]
                    if youngest is item.sequence and len(self.running) == 1:
                        raise
                    self._set_aside(youngest)
                    kept.pop(youngest, None)
        return list(kept.values())

    def _set_aside(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.saved = self._cache.save(sequence.table)
        self.waiting.appendleft(sequence)
        self.set_aside += 1
