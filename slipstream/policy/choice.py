"""The choice: which drafters each sequence asks, and which nodes are verified, by tokens per millisecond.

Both are pure functions of costs and worth. Sequences of a batch share the pass, and the call of a model-based drafter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

MIN_GAIN = 0.02  # over plain decoding, from which on a sequence begins to draft
STICKY = 0.01  # advantage of what the sequence did in the step before
_REFINEMENTS = 2


class Milliseconds(Protocol):
    """The cost of a pass by its rows."""

    def __getitem__(self, rows: int, /) -> float: ...


class Estimate(NamedTuple):
    """What one way to draft promises one sequence in a step. The first of a sequence is plain decoding."""

    drafters: tuple[str, ...] = ()
    shared: str | None = None  # the one of them whose call all sequences share
    accepted: float = 0.0  # drafted tokens
    nodes: float = 0.0  # rows beyond the root's
    own_ms: float = 0.0  # of the drafters that work for each sequence alone
    bonus: float = 0.0  # of the logarithm of the rate: against flapping
    short: bool = False  # one node only, to see whether drafts are accepted more or less often than usual


def short_try(pick: Estimate) -> Estimate:
    """A try of a single node of what a model drafts: cheap, and it tells whether its drafts are accepted."""
    return pick._replace(accepted=pick.accepted / (1 + pick.accepted), nodes=1.0, short=True)


class Choice(NamedTuple):
    """One estimate per sequence, and what the step as a whole is expected to give and cost."""

    picks: list[Estimate]
    tokens: float
    ms: float
    score: float  # logarithm of the objective


def choose(
    offers: Seq[Seq[Estimate]], cost: Milliseconds, shared_ms: Mapping[str, float], *, throughput: bool = False
) -> Choice:
    """The best assignment with at most one shared drafter.

    The objective is the geometric mean of the sequences' speeds, or with `throughput` the tokens of all per
    millisecond. For a lone sequence they are the same.
    """
    if len(offers) == 1:
        return _alone(offers[0], cost, shared_ms)
    users = {pick.shared for offer in offers for pick in offer}
    choices = [_with(shared, offers, cost, shared_ms, throughput) for shared in sorted(users, key=str)]
    return max(choices, key=lambda choice: choice.score)


def _alone(offer: Seq[Estimate], cost: Milliseconds, shared_ms: Mapping[str, float]) -> Choice:
    """The best way of a lone sequence; kept cheap, because a small model calls it in every step."""
    best, best_rate, best_ms = offer[0], 0.0, 0.0
    for pick in offer:
        ms = interpolated(cost, 1 + pick.nodes) + pick.own_ms
        if pick.shared is not None:
            ms += shared_ms[pick.shared]
        rate = (1 + pick.accepted) / ms * (1 + pick.bonus)
        if rate > best_rate:
            best, best_rate, best_ms = pick, rate, ms
    return Choice([best], 1 + best.accepted, best_ms, math.log(best_rate))


def _with(
    shared: str | None,
    offers: Seq[Seq[Estimate]],
    cost: Milliseconds,
    shared_ms: Mapping[str, float],
    throughput: bool,
) -> Choice:
    """The best assignment in which the only shared drafter is `shared`."""
    able = [[pick for pick in offer if pick.shared in (None, shared)] for offer in offers]
    call_ms = 0.0 if shared is None else shared_ms[shared]
    starts = [[offer[0] for offer in able], [max(offer, key=lambda pick: pick.accepted) for offer in able]]
    tried = [_refined(start, able, cost, call_ms, throughput) for start in starts[: 2 if starts[0] != starts[1] else 1]]
    return max(tried, key=lambda choice: choice.score)


def _refined(
    start: list[Estimate], able: Seq[Seq[Estimate]], cost: Milliseconds, call_ms: float, throughput: bool
) -> Choice:
    """The best assignment found from `start`: given its costs, each sequence takes the way with the best yield.

    A search from plain decoding alone misses drafts that pay only if all sequences draft, since they lengthen the step.
    """
    count, picks = len(able), start
    best = _total(picks, cost, call_ms if any(pick.shared for pick in picks) else 0.0, throughput)
    for _ in range(_REFINEMENTS):
        rate, row_ms = best.tokens / best.ms, row_cost(cost, count + round(sum(pick.nodes for pick in picks)))

        def value(pick: Estimate, rate: float = rate, row_ms: float = row_ms, ms: float = best.ms) -> float:
            extra = pick.nodes * row_ms + pick.own_ms
            if throughput:
                return pick.accepted - rate * extra + pick.bonus
            return math.log1p(pick.accepted) - count * extra / ms + pick.bonus

        picks = [max(offer, key=value) for offer in able]
        tried = _total(picks, cost, call_ms if any(pick.shared for pick in picks) else 0.0, throughput)
        best = max(best, tried, key=lambda choice: choice.score)
    return best


def choose_one(offers: Seq[Seq[Estimate]], ms: Seq[float], *, throughput: bool = False) -> tuple[int, Choice]:
    """The best of ways that all sequences share, and its number. `offers`: by way, then by sequence; `ms`: by way."""
    choices = [_scored(list(picks), each, throughput) for picks, each in zip(offers, ms, strict=True)]
    return max(enumerate(choices), key=lambda pair: pair[1].score)


def _total(picks: list[Estimate], cost: Milliseconds, call_ms: float, throughput: bool) -> Choice:
    rows = len(picks) + sum(pick.nodes for pick in picks)
    return _scored(picks, interpolated(cost, rows) + call_ms + sum(pick.own_ms for pick in picks), throughput)


def _scored(picks: list[Estimate], ms: float, throughput: bool) -> Choice:
    tokens = len(picks) + sum(pick.accepted for pick in picks)
    if throughput:
        speed = math.log(tokens / len(picks))
    else:
        speed = sum(math.log1p(pick.accepted) for pick in picks) / len(picks)
    bonus = sum(pick.bonus for pick in picks) / len(picks)
    return Choice(picks, tokens, ms, speed - math.log(ms) + bonus)


def interpolated(cost: Milliseconds, rows: float) -> float:
    """The cost of an expected number of rows."""
    low = int(rows)
    share = rows - low
    return cost[low] if share == 0.0 else (1 - share) * cost[low] + share * cost[low + 1]


def row_cost(cost: Milliseconds, rows: int, span: int = 4) -> float:
    """Milliseconds of one more row in a pass of `rows` rows."""
    return (cost[rows + span] - cost[rows]) / span


def best_count(survivals: Iterable[float], sequences: int, cost: Milliseconds, drafted_ms: float) -> int:
    """How many nodes to verify, the likeliest first: the number with the most tokens per millisecond.

    `survivals`: of all sequences' nodes, in descending order. `drafted_ms`: time that the drafts have taken.
    """
    tokens = float(sequences)
    best, best_rate = 0, tokens / (drafted_ms + cost[sequences])
    for count, survival in enumerate(survivals, 1):
        tokens += survival
        rate = tokens / (drafted_ms + cost[sequences + count])
        if rate > best_rate:
            best, best_rate = count, rate
    return best
