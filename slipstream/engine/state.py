"""The state that both runners share, and how a sequence leaves the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.cache import PagedCache
from slipstream.engine.drafting import DrafterSet
from slipstream.engine.scheduler import Scheduler
from slipstream.models.model import Model
from slipstream.sequence import TARGET, Sequence
from slipstream.verify import Verifier

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class EngineState:
    """The model, its cache, the drafters, the verifier and the queue of one engine."""

    model: Model
    cache: PagedCache
    drafters: DrafterSet
    verifier: Verifier
    scheduler: Scheduler
    departed: list[Sequence] = field(default_factory=list)  # left, and not yet reported

    def publish(self, sequence: Sequence) -> None:
        """After a step: let other sequences find its full pages."""
        self.guarded(sequence, lambda: self.cache.publish(sequence.table, TARGET, sequence.tokens))

    def finish(self, sequence: Sequence) -> None:
        """After a step: release a finished sequence, or the unused pages of a running one."""
        if sequence.finished:
            self.leave(sequence)
        else:
            self.guarded(sequence, lambda: self.cache.trim(sequence.table, len(sequence.tokens)))

    def guarded(self, sequence: Sequence, action: Callable[[], None]) -> None:
        """Run `action`; if it fails, only this sequence ends."""
        try:
            action()
        except Exception as error:
            self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """An error ends this sequence, and no other."""
        log.warning("request %s failed: %s: %s", sequence.request.id, type(error).__name__, error)
        sequence.error = error
        sequence.finish_reason = "error"
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Release everything that is kept for a sequence, once."""
        if self.scheduler.holds(sequence):
            self.drafters.close(sequence)
            sequence.drafting.clear()
            self.scheduler.remove(sequence)
            self.departed.append(sequence)
