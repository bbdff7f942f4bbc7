"""What the engine has done and what it holds, in numbers, for dashboards.

Nothing is counted twice and no total decreases: totals are those of the sequences that left plus those of the sequences
under way, and they outlive an engine that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slipstream.engine.step import Engine
from slipstream.policy import Tally
from slipstream.sequence import Sequence
from slipstream.types import Stats


@dataclass
class EngineStatus:
    """Totals since the start, and the state now."""

    stats: Stats = field(default_factory=Stats)  # of all requests, without lists per token or step
    tally: Tally = field(default_factory=Tally)  # nodes by drafter, depth and confidence
    faults: Counter[str] = field(default_factory=Counter)  # drafts that failed, by drafter
    decisions: Counter[tuple[str, bool]] = field(default_factory=Counter)  # by drafters ("": none) and probes
    batches: Counter[int] = field(default_factory=Counter)  # steps by the number of running sequences
    prompt_tokens: int = 0  # of sequences that have started
    cached_tokens: int = 0  # of those, found in the cache
    preemptions: int = 0
    restarts: int = 0  # of the engine, after a failure
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0


class StatusBoard:
    """Keeps the totals; used by the engine's thread alone."""

    def __init__(self) -> None:
        self._past = EngineStatus()

    def stepped(self, sequences: int) -> None:
        """Count a step in which so many sequences ran."""
        self._past.batches[sequences] += 1

    def left(self, sequence: Sequence) -> None:
        """Count a sequence that ended, for whatever reason."""
        _count(self._past, sequence)

    def restarted(self, engine: Engine) -> None:
        """Keep the totals of an engine that is replaced."""
        self._past.restarts += 1
        _add_engine(self._past, engine)

    def status(self, engine: Engine, sequences: Iterable[Sequence]) -> EngineStatus:
        """A copy of the totals, with those of the sequences of requests under way."""
        past, scheduler, cache = self._past, engine.scheduler, engine.cache
        now = replace(
            past,
            stats=Stats(),
            tally=Tally(),
            faults=Counter(past.faults),
            batches=Counter(past.batches),
            decisions=Counter(past.decisions),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=cache.capacity - cache.available,
            pages=cache.capacity,
        )
        now.stats.add(past.stats)
        now.tally.add(past.tally)
        _add_engine(now, engine)
        for sequence in sequences:
            _count(now, sequence)
        return now


def _add_engine(status: EngineStatus, engine: Engine) -> None:
    status.tally.add(engine.tally)
    for faults in (engine.drafters.faults, *(drafter.part_faults for drafter in engine.drafters.values())):
        status.faults.update(faults)
    status.preemptions += engine.scheduler.preemptions


def _count(status: EngineStatus, sequence: Sequence) -> None:
    status.stats.add(replace(sequence.stats, origins=[], decisions=[]))
    for one in sequence.stats.decisions:
        status.decisions["+".join(one.drafters), one.probe] += one.steps
    if sequence.cached or sequence.output_ids:
        status.prompt_tokens += len(sequence.request.prompt_ids)
        status.cached_tokens += sequence.found
