"""What is measured when: conditions, the order of prompts and of settings, and when to stop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.tree_sizes import sized

_SEED = 20
_BASE_SHARE = 3  # times as many prompts as a sweep's condition has the base, which gives the verdicts
_MARGIN = 1.15  # a group of prompts starts only if so many times its usual duration is left


@dataclass(frozen=True)
class Condition:
    """How prompts are asked. A sweep changes one of these at a time."""

    batch: int = 1  # requests at once
    context: int | None = None  # tokens that prompts are filled up to; None: as they are
    temperature: float | None = None  # None: what the prompt's line says, or 0
    nodes: int | None = None  # tree size of every drafter; None: as the settings say

    @property
    def group(self) -> int:
        """Prompts that are answered together: twice as many as run at once, so that the end counts less."""
        return self.batch if self.batch == 1 else 2 * self.batch

    def setting(self, name: str) -> str:
        """A setting under this condition: with the tree size of a sweep."""
        if self.nodes is None or name == PLAIN:
            return name
        return sized(name, self.nodes)

    def __str__(self) -> str:
        parts = [f"batch {self.batch}"]
        parts += [f"context {self.context}"] if self.context is not None else []
        parts += [f"temperature {self.temperature:g}"] if self.temperature is not None else []
        parts += [f"{self.nodes} nodes"] if self.nodes is not None else []
        return ", ".join(parts)


PLAIN = "none"


def conditions(
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (),
    temperatures: Sequence[float] = (),
    nodes: Sequence[int] = (),
) -> list[Condition]:
    """The base condition (the first batch and temperature, contexts and trees as they are), then each sweep's others.

    A single value is no sweep: it changes the base itself.
    """
    base = Condition(batches[0])
    if temperatures:
        base = replace(base, temperature=temperatures[0])
    if len(contexts) == 1:
        base = replace(base, context=contexts[0])
    if len(nodes) == 1:
        base = replace(base, nodes=nodes[0])
    found = [base, *(replace(base, batch=batch) for batch in batches)]
    found += [replace(base, context=length) for length in contexts]
    found += [replace(base, temperature=temperature) for temperature in temperatures]
    found += [replace(base, nodes=count) for count in nodes]
    return list(dict.fromkeys(found))


def stratified(prompts: Sequence[BenchPrompt]) -> list[int]:
    """Indices of prompts in an order of which every beginning has as many of each category as possible."""
    rng = random.Random(_SEED)
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    columns = list(by_category.values())
    for column in columns:
        rng.shuffle(column)
    order: list[int] = []
    for rank in zip_longest(*columns):
        row = [index for index in rank if index is not None]
        rng.shuffle(row)  # so that batches of neighbours are not always the same categories
        order += row
    return order


class Turn(NamedTuple):
    """A group of prompts to answer with every setting, in this order of settings."""

    condition: int
    group: int
    round: int
    prompts: tuple[int, ...]
    settings: tuple[str, ...]


class Schedule:
    """Turns until the time is up. Conditions go on side by side, so that they have the same prompts.

    Settings take turns to be the first. Plain decoding has its turn once in `plain_every` turns of a condition.
    """

    def __init__(
        self,
        order: Sequence[int],
        conditions: Sequence[Condition],
        settings: Sequence[str],
        deadline: float,
        *,
        repeats: bool = True,
    ) -> None:
        self._conditions = list(conditions)
        self._settings = tuple(settings)
        self._deadline = deadline
        self._repeats = repeats
        self._asked = [0] * len(self._conditions)  # prompts
        self._turns = [self._groups(order, condition.group) for condition in self._conditions]
        self._next = [0] * len(self._conditions)
        self._costs: list[list[float]] = [[] for _ in self._conditions]
        self.tight = [False] * len(self._conditions)
        self.plain_every = [1] * len(self._conditions)

    @staticmethod
    def _groups(order: Sequence[int], size: int) -> list[tuple[int, ...]]:
        """Groups of `size` prompts; the last is filled up from the beginning, so that all have the same load."""
        whole = list(order) * (2 + size // max(1, len(order)))
        return [tuple(whole[start : start + size]) for start in range(0, len(order), size)]

    def __iter__(self) -> Iterator[Turn]:
        while True:
            open_ones = [i for i in range(len(self._conditions)) if not self._done(i)]
            if not open_ones:
                return
            chosen = min(open_ones, key=lambda i: self._asked[i] / (_BASE_SHARE if i == 0 else 1))
            count, groups = self._next[chosen], self._turns[chosen]
            settings = [self._conditions[chosen].setting(name) for name in self._settings]
            first = count % len(settings)
            turns = (*settings[first:], *settings[:first])
            round, group = divmod(count, len(groups))
            if (count + round) % self.plain_every[chosen]:  # in each round it is asked other prompts
                turns = tuple(name for name in turns if name != PLAIN)
            began = time.monotonic()
            yield Turn(chosen, group, round, groups[group], turns)
            cost = time.monotonic() - began
            self._next[chosen] += 1
            self._asked[chosen] += len(groups[group])
            self._costs[chosen].append(cost)

    def _done(self, condition: int) -> bool:
        """Whether a condition is done: it is precise enough, time is short, or its prompts may not be repeated."""
        if self.tight[condition] or (not self._repeats and self._next[condition] >= len(self._turns[condition])):
            return True
        costs = self._costs[condition][-8:]
        if not costs:  # each condition is tried at least once
            return False
        return time.monotonic() + _MARGIN * max(median(costs), costs[-1]) > self._deadline
