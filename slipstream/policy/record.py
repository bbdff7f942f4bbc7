"""What ways to draft have brought: by request, and over all requests, from which a request starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream.policy.base import Part
from slipstream.policy.calibration import Tilt, temperature_class
from slipstream.sequence import Sequence

RECORD = "policy.record"  # key in `Sequence.drafting`
_KEPT_BY_REQUEST = 0.85  # of the counts at each step: about the last seven steps that drafted
_KEPT_BY_ALL = 0.98
_START = 3.0  # weight of the prior, in steps

# Where nothing is known: accepted tokens by the length of a match in the text, and those of a model-based drafter.
_MATCHES = (1, 2, 3, 5, 9, 17)  # the shortest match of each class
_ACCEPTED_BY_MATCH = (0.0, 0.25, 0.5, 0.9, 1.8, 3.5, 6.0)
_ACCEPTED_BY_MODEL = 1.5
_NODES = 8.0

Way = tuple[str, ...]  # labels of the drafters that one sequence asks in one step; (): plain decoding


class Context(NamedTuple):
    """What is known of a step before anything is drafted, in classes."""

    match: int  # of the longest match in the text; 0: none
    temp_class: int  # temperature class
    size: int  # of the batch


def match_class(matched: int) -> int:
    """The class of a match of so many tokens."""
    return sum(matched >= least for least in _MATCHES)


def size_class(sequences: int) -> int:
    """The class of a batch: 1, 2, 3 to 4, 5 and more sequences."""
    return min(3, (sequences - 1).bit_length())


class Mean:
    """Decayed sums over steps."""

    __slots__ = ("accepted", "nodes", "steps")

    def __init__(self, steps: float = 0.0, accepted: float = 0.0, nodes: float = 0.0) -> None:
        self.steps, self.accepted, self.nodes = steps, accepted, nodes

    def add(self, accepted: float, nodes: float, kept: float) -> None:
        """Add a step."""
        self.steps = kept * self.steps + 1
        self.accepted = kept * self.accepted + accepted
        self.nodes = kept * self.nodes + nodes


class Record:
    """The means of all requests."""

    def __init__(self) -> None:
        self._means: dict[tuple[Way, Context], Mean] = {}

    def mean(self, way: Way, context: Context, *, model: bool) -> tuple[float, float]:
        """Mean accepted tokens and nodes per step of this way. A guess is the prior of lone sequences, whose mean is
        the prior of this batch size; a prior weighs a few steps.
        """
        accepted, nodes = _ACCEPTED_BY_MATCH[context.match] + (_ACCEPTED_BY_MODEL if model else 0.0), _NODES
        for place in (context._replace(size=0), context) if context.size else (context,):
            found = self._means.get((way, place))
            if found is not None:
                steps = found.steps + _START
                accepted = (found.accepted + _START * accepted) / steps
                nodes = (found.nodes + _START * nodes) / steps
        return accepted, nodes

    def ways(self) -> set[Way]:
        """All ways that have been recorded."""
        return {way for way, _ in self._means}

    def knows(self, way: Way, context: Context) -> bool:
        """Whether there are steps of this way in this context, or of lone sequences."""
        return any((way, place) in self._means for place in (context, context._replace(size=0)))

    def add(self, way: Way, context: Context, accepted: float, nodes: int) -> None:
        """Add a step that drafted this way; or a burst, with the mean acceptance of its rounds."""
        self._means.setdefault((way, context), Mean()).add(accepted, nodes, _KEPT_BY_ALL)

    def state(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {
            f"{'+'.join(way)}|{','.join(map(str, context))}": [round(n, 3) for n in (m.steps, m.accepted, m.nodes)]
            for (way, context), m in self._means.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what `state` gave."""
        for key, numbers in state.items():
            way, _, context = key.rpartition("|")
            self._means[tuple(way.split("+")), Context(*map(int, context.split(",")))] = Mean(*map(float, numbers))


class Pending(NamedTuple):
    """What was planned for a sequence's step, until it is observed."""

    way: Way
    context: Context
    matched: int
    probe: bool
    expected_tokens: float
    expected_ms: float
    plain_ms: float
    chosen_tokens: float  # that the chosen way promised, if this one is a probe
    rate: float  # tokens per millisecond of the whole step, as expected
    short: bool = False  # one node only
    model: bool = False  # whether the way has a drafter whose call is shared
    draft_ms: float = 0.0  # expected of the draft


class RequestRecord:
    """The means and tilts of one request."""

    __slots__ = (
        "_means",
        "able",
        "dropped",
        "options",
        "pending",
        "promised",
        "step",
        "temp_class",
        "tilts",
        "tried",
        "way",
    )

    def __init__(self, temp_class: int) -> None:
        self.temp_class = temp_class  # temperature class
        self._means: dict[tuple[Way, int], Mean] = {}  # by way and class of match
        self.able: list[tuple[str, Part]] | None = None  # the drafters that it may use, once they were looked up
        self.dropped = 0  # drafters that had failed on it by then
        self.options: Any = None  # its ways to draft, the situation that they hold for, and until which step
        self.tilts: dict[str, Tilt] = {}  # by origin
        self.way: Way = ()  # of the last step
        self.step = 0
        self.tried: dict[Way, int] = {}  # the last step with this way
        self.pending: Pending | None = None
        self.promised: dict[str, float] = {}  # accepted tokens that the verified nodes promise, by origin

    def mean(self, way: Way, match: int, start: tuple[float, float]) -> tuple[float, float]:
        """Accepted tokens and nodes per step: the request's own steps, and some of all requests'."""
        own = self._means.get((way, match))
        if own is None:
            return start
        steps = own.steps + _START
        return (own.accepted + _START * start[0]) / steps, (own.nodes + _START * start[1]) / steps

    def add(self, way: Way, context: Context, accepted: float, nodes: float) -> None:
        """Add a step that drafted this way."""
        self._means.setdefault((way, context.match), Mean()).add(accepted, nodes, _KEPT_BY_REQUEST)


def record_of(sequence: Sequence) -> RequestRecord:
    """The record of a sequence, made when it is first asked for."""
    found: RequestRecord | None = sequence.drafting.get(RECORD)
    if found is None:
        found = sequence.drafting[RECORD] = RequestRecord(temperature_class(sequence.params))
    return found
