"""From measured answers to figures: one set per condition, setting and category.

*speed-up*: tokens per second from arrival to last token, over those of plain decoding on the same prompts in the same
process. *decode speed-up*: the same without the time of the first token. TTFT: first token - arrival. TPOT: (last -
first token) / (tokens - 1). ITL: the gaps between tokens as a client sees them: tokens of one step arrive together, so
most of them are zero; gaps between deliveries are `chunk_gap_ms`. Answers that loop are easy to draft and mean nothing:
they are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from slipstream.bench.condition_table import ConditionTable, Key
from slipstream.bench.intervals import Interval
from slipstream.bench.measure import Answer
from slipstream.bench.schedule import PLAIN
from slipstream.types import Stats

_PERCENTILES = (50, 90, 95, 99)

Json = dict[str, Any]


def figures(table: ConditionTable, setting: str, category: str) -> Json | None:
    """Everything about a setting on a category; None without answers."""
    keys = table.chosen(category)
    answers, plain_answers = table.answers(setting, keys), table.answers(PLAIN, keys)
    if not answers:
        return None
    total, plain = _summed(answers), _summed(plain_answers)
    return {
        "prompts": len({answer.prompt for answer in answers}),
        "answers": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "tok_s": _bounds(table.tokens_per_second(setting, keys)),
        "speedup": _bounds(table.speedup(setting, keys)),
        "speedup_beyond": _bounds(table.speedup(setting, keys, beyond=True)),
        "decode_speedup": _bounds(table.speedup(setting, keys, decode=True)),
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
        "step_ms": _step_split(total, len(answers), table.condition.batch),
        "rows_per_step": round(1 + total.drafted / max(1, total.steps), 3),
        "break_even_tokens_per_step": _break_even(total, plain, len(answers), len(plain_answers)),
        "identical": _agreement(table, setting, keys),
        "draft_faults": total.draft_faults,
        "lossy": total.lossy,
    }


def _agreement(table: ConditionTable, setting: str, keys: Sequence[Key]) -> Json:
    """How many answers are those of plain decoding, and where the others first differ."""
    pairs, differ = table.beside_plain(setting, keys), []
    for mine, plain in pairs:
        if mine != plain:
            places = enumerate(zip(mine, plain, strict=False))
            differ.append(next((i for i, (a, b) in places if a != b), min(len(mine), len(plain))))
    same = len(pairs) - len(differ)
    return {"answers": same, "of": len(pairs), "first_difference": median(differ) if differ else None}


def percentiles(values: Iterable[float], points: Sequence[int] = _PERCENTILES) -> Json | None:
    """Mean and percentiles; None without values."""
    listed = np.fromiter(values, float)
    if not len(listed):
        return None
    found = {f"p{point}": round(float(np.percentile(listed, point)), 3) for point in points}
    return {"mean": round(float(listed.mean()), 3), **found}


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
