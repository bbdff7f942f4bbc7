"""When ways to draft that were not chosen are tried: seldom where that did not pay, and never for much of the time."""

from __future__ import annotations

from slipstream.policy.record import Way

_SHARE, _MOST = 0.01, 0.005  # of the time, for all tries together and for those of one way
EVERY, _SELDOM = 8, 32  # steps between two tries of one way: twice as many after each that did not pay
_MANY, _SELDOM_OF_MANY = 4, 256  # the same for batches from so many sequences on, where a try takes all their time


class Probes:
    """What tries have cost, and when the next one is due."""

    def __init__(self) -> None:
        self._step = 0
        self._spent: dict[Way, float] = {}  # milliseconds
        self._last: dict[Way, int] = {}  # step
        self._wait: dict[Way, int] = {}  # steps

    def next_step(self, steps: int = 1) -> None:
        """Count steps that are decided."""
        self._step += steps

    def due(self, way: Way, lost_ms: float, all_ms: float) -> bool:
        """Whether a try that is expected to lose so much may be made; `all_ms`: time since the start."""
        if self._step - self._last.get(way, -EVERY) < self._wait.get(way, EVERY):
            return False
        own, together = self._spent.get(way, 0.0) + lost_ms, sum(self._spent.values()) + lost_ms
        return own <= _MOST * all_ms and together <= _SHARE * all_ms

    def paid(self, way: Way) -> bool:
        """Whether the last try paid. If so, the next try is of a whole draft instead of a single node."""
        return self._wait.get(way) == EVERY

    def begin(self, way: Way) -> None:
        """Record that a try is made in this step."""
        self._last[way] = self._step

    def ended(self, way: Way, lost_ms: float, sequences: int = 1) -> None:
        """Record the time that a try has lost in a batch of so many sequences; zero or negative if it paid."""
        self._spent[way] = self._spent.get(way, 0.0) + max(0.0, lost_ms)
        most = _SELDOM if sequences < _MANY else _SELDOM_OF_MANY
        self._wait[way] = EVERY if lost_ms <= 0.0 else min(2 * self._wait.get(way, EVERY), most)
