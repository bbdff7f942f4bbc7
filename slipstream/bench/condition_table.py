"""The answers under one condition, and the ratios between settings.

Plain decoding may have been asked fewer prompts than the others: its time on the rest is that of their lengths
(`plain_times.py`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from slipstream.bench.intervals import Bootstrap, Column, Interval
from slipstream.bench.measure import Answer
from slipstream.bench.plain_times import Length, PlainTimes, fit
from slipstream.bench.schedule import PLAIN, Condition
from slipstream.train.synth.loops import loop_start

ALL, LOOPING = "all", "looping"
_PLAIN_EVERY = 8

Key = tuple[int, int]  # prompt, turn of its conversation
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Grouping:
    """What figures need to know of the prompts: their categories, and how much each category counts."""

    categories: Sequence[str]  # by prompt
    shares: dict[str, float]  # prompts of a category in the whole file


class ConditionTable:
    """The answers under one condition, by setting and prompt; times are medians over rounds."""

    def __init__(self, answers: Iterable[Answer], condition: Condition, grouping: Grouping) -> None:
        self.condition = condition
        self._grouping = grouping
        self._rounds: dict[str, dict[Key, list[Answer]]] = defaultdict(lambda: defaultdict(list))
        for answer in answers:
            self._rounds[answer.setting][answer.prompt, answer.turn].append(answer)
        drafted = [set(found) for name, found in self._rounds.items() if name != PLAIN]
        keys = set.intersection(*drafted) if drafted else set()  # what every setting has answered
        self._plain = keys & self._rounds[PLAIN].keys()
        self._fits = {read: self._fitted(read) for read in (_e2e_ms, _decode_ms)}
        if None in self._fits.values():
            keys = self._plain
        self.keys = sorted(keys)
        self.looping = {key for key in self.keys if loop_start(self._first(key).token_ids) is not None}
        self._clusters = {key: self._cluster(self._first(key)) for key in self.keys}

    def _first(self, key: Key) -> Answer:
        """An answer to a prompt: of plain decoding, if it was asked."""
        return (self._rounds[PLAIN] if key in self._plain else self._rounds[self._drafters[0]])[key][0]

    @property
    def _drafters(self) -> list[str]:
        return [name for name in self._rounds if name != PLAIN]

    def _fitted(self, read: Callable[[Answer], float]) -> PlainTimes | None:
        """Plain decoding's times by lengths; None if they are to be measured for every prompt."""
        if self.condition.batch > 1:
            return None
        each = [self._rounds[PLAIN][key] for key in self._plain]
        timed = [rounds for rounds in each if read(rounds[0]) > 0]
        return fit([_length(rounds[0]) for rounds in timed], [median(map(read, rounds)) for rounds in timed])

    def _cluster(self, answer: Answer) -> int:
        """The unit of resampling: a conversation, or prompts that were answered together."""
        return answer.prompt if self.condition.batch == 1 else answer.group

    @property
    def settings(self) -> list[str]:
        """The settings that were measured."""
        return list(self._rounds)

    @property
    def categories(self) -> list[str]:
        """Categories with answers that do not loop, in the order of the prompts."""
        found = {self._grouping.categories[prompt] for prompt, turn in self.keys if (prompt, turn) not in self.looping}
        return [name for name in dict.fromkeys(self._grouping.categories) if name in found]

    def chosen(self, category: str) -> list[Key]:
        """The answers of a category, of all categories, or those that loop."""
        if category == LOOPING:
            return sorted(self.looping)
        names = self._grouping.categories
        return [k for k in self.keys if k not in self.looping and category in (ALL, names[k[0]])]

    def answers(self, setting: str, keys: Iterable[Key]) -> list[Answer]:
        """All answers of a setting, of all rounds."""
        return [answer for key in keys if key in self._rounds[setting] for answer in self._rounds[setting][key]]

    def beside_plain(self, setting: str, keys: Iterable[Key]) -> list[tuple[Ids, Ids]]:
        """Pairs of token ids, of a setting and of plain decoding, for the prompts that plain decoding answered."""
        rounds, plain = self._rounds[setting], self._rounds[PLAIN]
        return [(rounds[key][0].token_ids, plain[key][0].token_ids) for key in keys if key in self._plain]

    def _column(self, setting: str, keys: Sequence[Key], read: Callable[[Answer], float]) -> Column:
        """A value summed over each cluster: [clusters]."""
        return self._summed(keys, [median(map(read, self._rounds[setting][key])) for key in keys])

    def _summed(self, keys: Sequence[Key], values: Iterable[float]) -> Column:
        sums: dict[int, float] = dict.fromkeys((self._clusters[key] for key in keys), 0.0)
        for key, value in zip(keys, values, strict=True):
            sums[self._clusters[key]] += value
        return np.array(list(sums.values()))

    def _tokens_and_ms(
        self, setting: str, keys: Sequence[Key], *, decode: bool = False
    ) -> tuple[tuple[Column, Column], float]:
        """Tokens and milliseconds by cluster, and how much of the latter is a fit's: its relative variance."""
        tokens, ms = (_decoded, _decode_ms) if decode else (_tokens, _e2e_ms)
        fitted = self._fits[ms]
        if setting != PLAIN or fitted is None or self._plain.issuperset(keys):
            return (self._column(setting, keys, tokens), self._column(setting, keys, ms)), 0.0
        alike = [self._first(key) for key in keys]
        lengths = [_length(answer) for answer in alike]
        shares = dict(zip(dict.fromkeys(self._clusters[key] for key in keys), self.bootstrap(keys).shares, strict=True))
        variance = fitted.variance(lengths, np.array([shares[self._clusters[key]] for key in keys]))
        columns = (self._summed(keys, map(tokens, alike)), self._summed(keys, fitted.ms(lengths)))
        return columns, variance

    def bootstrap(self, keys: Sequence[Key], *, beyond: bool = False) -> Bootstrap:
        """Draws of these answers' clusters, stratified by category; a category counts by its share in the file.

        They stand for the prompts of the file; `beyond`: for all prompts that are like them.
        """
        members: dict[int, str] = {}
        for key in keys:
            members.setdefault(self._clusters[key], self._grouping.categories[key[0]])
        if self.condition.batch > 1:
            return Bootstrap([ALL] * len(members))
        names = list(members.values())
        shares = np.array([self._grouping.shares[name] / names.count(name) for name in names])
        open_part = None if beyond else np.array([self._open_part.get(name, 1.0) for name in names])
        return Bootstrap(names, shares / shares.mean() if len(shares) else shares, open_part)

    @cached_property
    def _open_part(self) -> dict[str, float]:
        """By category, the part of the variance that does not vanish when all of its prompts are measured, and of
        what vanishes, the part that has not yet: 1 - f (1 - noise / all) for a fraction f of its prompts."""
        if not self._fits[_e2e_ms] or not self.spread:
            return {}
        noise = min(1.0, 2 * (self.noise / self.spread) ** 2)  # of two measured times, at most
        names = Counter(self._grouping.categories[prompt] for prompt in {prompt for prompt, _ in self.keys})
        return {name: 1 - min(1.0, count / self._grouping.shares[name]) * (1 - noise) for name, count in names.items()}

    @property
    def noise(self) -> float:
        """Standard deviation of a measured time, relative to what its lengths say."""
        fitted = self._fits[_e2e_ms]
        return fitted.noise if fitted else 0.0

    @cached_property
    def spread(self) -> float:
        """The smallest standard deviation of a setting's speed-ups within categories, relative to their means."""
        fitted, keys = self._fits[_e2e_ms], self.chosen(ALL)
        if fitted is None or not keys:
            return 0.0
        plain = np.log(fitted.ms([_length(self._first(key)) for key in keys]).clip(1e-9))
        names = np.array([self._grouping.categories[prompt] for prompt, _ in keys])
        found = []
        for setting in self._drafters:
            gains = plain - np.log([median(map(_e2e_ms, self._rounds[setting][key])) for key in keys])
            within = [gains[names == name] for name in self.categories]
            freedom = sum(len(each) - 1 for each in within)
            if freedom:
                found.append(math.sqrt(sum(((each - each.mean()) ** 2).sum() for each in within) / freedom))
        return min(found, default=0.0)

    def plain_every(self) -> int:
        """One plain answer to so many of the others makes the most of the time, at most `_PLAIN_EVERY`."""
        if not self.noise or not self.spread:
            return 1
        times = [sum(median(map(_e2e_ms, self._rounds[name][key])) for name in self._drafters) for key in self._plain]
        plain = [median(map(_e2e_ms, self._rounds[PLAIN][key])) for key in self._plain]
        every = self.spread / self.noise * math.sqrt(sum(plain) / sum(times))  # Neyman's allocation
        return max(1, min(_PLAIN_EVERY, round(every)))

    def speedup(self, setting: str, keys: Sequence[Key], *, decode: bool = False, beyond: bool = False) -> Interval:
        """The speed-up over plain decoding; `decode`: without the first token's time."""
        return self.ratio(setting, PLAIN, keys, decode=decode, beyond=beyond)

    def ratio(
        self, setting: str, other: str, keys: Sequence[Key], *, decode: bool = False, beyond: bool = False
    ) -> Interval:
        """The speed-up of a setting over another."""
        if setting == other:
            return Interval(1.0, 1.0, 1.0)
        mine, _ = self._tokens_and_ms(setting, keys, decode=decode)
        theirs, besides = self._tokens_and_ms(other, keys, decode=decode)
        return self.bootstrap(keys, beyond=beyond).ratio_of_ratios(mine, theirs, besides)

    def tokens_per_second(self, setting: str, keys: Sequence[Key]) -> Interval:
        """Tokens per second of all requests together: at batch 1 over the time from arrival to last token."""
        if self.condition.batch == 1:
            (tokens, ms), besides = self._tokens_and_ms(setting, keys)
            return self.bootstrap(keys).ratio(1000 * tokens, ms, besides)
        shared = self._column(setting, keys, _wall_share(self.answers(setting, self.keys)))
        return self.bootstrap(keys).ratio(1000 * self._column(setting, keys, _tokens), shared)


def _length(answer: Answer) -> Length:
    return Length(answer.prompt_tokens, len(answer.token_ids))


def _tokens(answer: Answer) -> float:
    return len(answer.token_ids)


def _e2e_ms(answer: Answer) -> float:
    return answer.e2e_ms


def _decoded(answer: Answer) -> float:
    return answer.stats.decoded


def _decode_ms(answer: Answer) -> float:
    return answer.stats.decode_ms


def _wall_share(answers: Sequence[Answer]) -> Callable[[Answer], float]:
    """The part of its group's wall time that an answer stands for: by its tokens."""
    totals: dict[tuple[int, int, int], int] = defaultdict(int)
    for answer in answers:
        totals[answer.group, answer.round, answer.turn] += len(answer.token_ids)
    return lambda a: a.wall_ms * len(a.token_ids) / max(1, totals[a.group, a.round, a.turn])
