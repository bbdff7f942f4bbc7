"""From measured answers to figures: one set per condition, setting and category.

*speed-up*: tokens per second from arrival to last token, over those of plain decoding on the same prompts in the same
process. *decode speed-up*: the same without the time of the first token. TTFT: first token - arrival. TPOT: (last -
first token) / (tokens - 1). ITL: the gaps between tokens as a client sees them: tokens of one step arrive together, so
most of them are zero; gaps between deliveries are `chunk_gap_ms`. Answers that loop are easy to draft and mean nothing:
they are kept apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from slipstream.bench.intervals import Bootstrap, Column, Interval
from slipstream.bench.measure import Answer
from slipstream.bench.schedule import PLAIN, Condition
from slipstream.train.synth.loops import loop_start
from slipstream.types import Stats

ALL, LOOPING = "all", "looping"
_PERCENTILES = (50, 90, 95, 99)

Key = tuple[int, int]  # prompt, turn of its conversation
Json = dict[str, Any]


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
        whole = [set(found) for found in self._rounds.values()]
        self.keys = sorted(set.intersection(*whole)) if whole else []  # what every setting has answered
        plain = self._rounds[PLAIN]
        self.looping = {key for key in self.keys if loop_start(plain[key][0].token_ids) is not None}
        self._clusters = {key: self._cluster(plain[key][0]) for key in self.keys}

    def _cluster(self, answer: Answer) -> int:
        """What is drawn as one: a conversation; or prompts that were answered together."""
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
        return [answer for key in keys for answer in self._rounds[setting][key]]

    def _column(self, setting: str, keys: Sequence[Key], read: Callable[[Answer], float]) -> Column:
        """A value summed over each cluster: [clusters]."""
        sums: dict[int, float] = dict.fromkeys((self._clusters[key] for key in keys), 0.0)
        for key in keys:
            sums[self._clusters[key]] += median(read(answer) for answer in self._rounds[setting][key])
        return np.array(list(sums.values()))

    def bootstrap(self, keys: Sequence[Key]) -> Bootstrap:
        """Draws of these answers' clusters, stratified by category; a category counts by its share in the file."""
        members: dict[int, str] = {}
        for key in keys:
            members.setdefault(self._clusters[key], self._grouping.categories[key[0]])
        if self.condition.batch > 1:
            return Bootstrap([ALL] * len(members))
        names = list(members.values())
        shares = np.array([self._grouping.shares[name] / names.count(name) for name in names])
        return Bootstrap(names, shares / shares.mean() if len(shares) else shares)

    def speedup(self, setting: str, keys: Sequence[Key], *, decode: bool = False) -> Interval:
        """The speed-up over plain decoding; `decode`: without the first token's time."""
        return self.ratio(setting, PLAIN, keys, decode=decode)

    def ratio(self, setting: str, other: str, keys: Sequence[Key], *, decode: bool = False) -> Interval:
        """The speed-up of a setting over another."""
        tokens, ms = (_decoded, _decode_ms) if decode else (_tokens, _e2e_ms)
        mine = (self._column(setting, keys, tokens), self._column(setting, keys, ms))
        theirs = (self._column(other, keys, tokens), self._column(other, keys, ms))
        return self.bootstrap(keys).ratio_of_ratios(mine, theirs)

    def tokens_per_second(self, setting: str, keys: Sequence[Key]) -> Interval:
        """Tokens per second of all requests together: at batch 1 over the time from arrival to last token."""
        tokens = self._column(setting, keys, _tokens)
        if self.condition.batch == 1:
            return self.bootstrap(keys).ratio(1000 * tokens, self._column(setting, keys, _e2e_ms))
        shared = self._column(setting, keys, _wall_share(self.answers(setting, self.keys)))
        return self.bootstrap(keys).ratio(1000 * tokens, shared)

    def figures(self, setting: str, category: str) -> Json | None:
        """Everything about a setting on a category; None without answers."""
        keys = self.chosen(category)
        if not keys:
            return None
        answers, plain_answers = self.answers(setting, keys), self.answers(PLAIN, keys)
        total, plain = _summed(answers), _summed(plain_answers)
        return {
            "prompts": len({prompt for prompt, _ in keys}),
            "answers": len(answers),
            "tokens": sum(len(answer.token_ids) for answer in answers),
            "tok_s": _bounds(self.tokens_per_second(setting, keys)),
            "speedup": _bounds(self.speedup(setting, keys)),
            "decode_speedup": _bounds(self.speedup(setting, keys, decode=True)),
            "ttft_ms": percentiles(answer.ttft_ms for answer in answers),
            "tpot_ms": percentiles(_tpot(answer) for answer in answers if len(answer.token_ids) > 1),
            "itl_ms": percentiles(gap for answer in answers for gap in _gaps(answer, together=True)),
            "chunk_gap_ms": percentiles(gap for answer in answers for gap in _gaps(answer, together=False)),
            "e2e_ms": percentiles(answer.e2e_ms for answer in answers),
            "tokens_per_step": round(total.tokens_per_step, 4),
            "acceptance_length": round(total.acceptance_length, 4),
            "acceptance_length_by_request": percentiles((a.stats.acceptance_length for a in answers), (10, 50, 90)),
            "acceptance_rate": round(total.acceptance_rate, 4),
            **_by_depth(total),
            "step_ms": _step_split(total, len(answers), self.condition.batch),
            "rows_per_step": round(1 + total.drafted / max(1, total.steps), 3),
            "break_even_tokens_per_step": _break_even(total, plain, len(answers), len(plain_answers)),
            "identical": self._agreement(setting, keys),
            "draft_faults": total.draft_faults,
            "lossy": total.lossy,
        }

    def _agreement(self, setting: str, keys: Sequence[Key]) -> Json:
        """How many answers are those of plain decoding, and where the others first differ."""
        same, differ = 0, []
        for key in keys:
            mine, plain = self._rounds[setting][key][0].token_ids, self._rounds[PLAIN][key][0].token_ids
            if mine == plain:
                same += 1
            else:
                pairs = enumerate(zip(mine, plain, strict=False))
                differ.append(next((i for i, (a, b) in pairs if a != b), min(len(mine), len(plain))))
        return {"answers": same, "of": len(keys), "first_difference": median(differ) if differ else None}


def percentiles(values: Iterable[float], points: Sequence[int] = _PERCENTILES) -> Json | None:
    """Mean and percentiles; None without values."""
    listed = np.fromiter(values, float)
    if not len(listed):
        return None
    found = {f"p{point}": round(float(np.percentile(listed, point)), 3) for point in points}
    return {"mean": round(float(listed.mean()), 3), **found}


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


def _tpot(answer: Answer) -> float:
    return (answer.e2e_ms - answer.ttft_ms) / (len(answer.token_ids) - 1)


def _gaps(answer: Answer, *, together: bool) -> list[float]:
    """Gaps between deliveries; `together`: also those, of length 0, between tokens of one delivery."""
    found: list[float] = []
    for (before, _), (when, count) in zip(answer.chunks, answer.chunks[1:], strict=False):
        found.append(when - before)
        found += [0.0] * (count - 1) * together
    return found


def _summed(answers: Iterable[Answer]) -> Stats:
    total = Stats()
    for answer in answers:
        total.add(replace(answer.stats, origins=[]))
    return total


def _by_depth(total: Stats) -> Json:
    """Joint: steps that accepted a node at this depth, of all that drafted. Conditional: of those that got so far."""
    accepted, drafting = total.accepted_by_depth, max(1, total.drafting_steps)
    before = [total.drafting_steps, *accepted]
    return {
        "accepted_by_depth": [round(count / drafting, 4) for count in accepted],
        "accepted_given_parent": [round(count / max(1, b), 4) for count, b in zip(accepted, before, strict=False)],
        "offered_by_depth": [round(count / drafting, 4) for count in total.offered_by_depth],
    }


def _decode_step_ms(total: Stats, answers: int) -> float | None:
    """Milliseconds of a step after the first, whose time is TTFT; None if every answer had one step only."""
    steps = total.steps - answers
    return total.decode_ms / steps if steps > 0 else None


def _step_split(total: Stats, answers: int, batch: int) -> Json | None:
    """Where the time of a decode step goes. Counters include prefills, which are passes of the target: taken off."""
    step = _decode_step_ms(total, answers)
    verify = max(0.0, total.verify_ms - total.prefill_ms / batch)
    parts = {"draft": total.draft_ms, "verify": verify, "other": total.other_ms}
    whole = sum(parts.values())
    if step is None or not whole:
        return None
    return {"total": round(step, 4), **{name: round(step * ms / whole, 4) for name, ms in parts.items()}}


def _break_even(total: Stats, plain: Stats, answers: int, plain_answers: int) -> float | None:
    """Tokens per step at which a setting is as fast as plain decoding: the cost of its step in plain steps."""
    mine, theirs = _decode_step_ms(total, answers), _decode_step_ms(plain, plain_answers)
    return round(mine / theirs, 4) if mine and theirs else None


def _bounds(interval: Interval) -> list[float | None]:
    """[value, low, high] for JSON."""
    return [None if bound is None else round(bound, 4) for bound in interval]
