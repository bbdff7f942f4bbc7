"""Compares two results prompt by prompt."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np

from slipstream.bench.intervals import Bootstrap, Column, Interval
from slipstream.bench.schedule import PLAIN
from slipstream.errors import OptionError

Json = dict[str, Any]
Key = tuple[str, int]  # prompt, turn


def compare_results(first: Json, second: Json) -> Json:
    """For each setting of both runs' base conditions: speed-ups, and how the second's relate to the first's.

    Speed-ups are compared, because each is against plain decoding of its own run: what slowed a machine down cancels.
    Plain decoding itself is compared by its tokens per second, which shows whether the machines were alike.
    """
    a, b = _times(first), _times(second)
    settings = [name for name in first.get("settings", []) if name in b and name != PLAIN]
    if not settings:
        raise OptionError("the two results have no setting in common", hint="`none` alone is nothing to compare")
    keys = sorted(set(a[PLAIN]) & set(b[PLAIN]))
    if not keys:
        raise OptionError("the two results have no prompt in common")
    categories = {(row["prompt"], row["turn"]): row["category"] for row in first["answers"]}
    bootstrap = Bootstrap([categories[key] for key in keys])
    plain_a, plain_b = _columns(a[PLAIN], keys), _columns(b[PLAIN], keys)
    rows = []
    for name in settings:
        mine_a, mine_b = _columns(a[name], keys), _columns(b[name], keys)
        rows.append(
            {
                "setting": name,
                "first": list(bootstrap.ratio_of_ratios(mine_a, plain_a)),
                "second": list(bootstrap.ratio_of_ratios(mine_b, plain_b)),
                "change": list(change := _change(bootstrap, (mine_a, plain_a), (mine_b, plain_b))),
                "verdict": _verdict(name, change),
            }
        )
    plain = bootstrap.ratio_of_ratios(plain_b, plain_a)
    return {
        "prompts": len(keys),
        "plain": {"first_tok_s": _speed(plain_a), "second_tok_s": _speed(plain_b), "change": list(plain)},
        "settings": rows,
        "notes": _notes(first, second),
    }


def _times(results: Json) -> dict[str, dict[Key, tuple[float, float]]]:
    """Tokens and milliseconds of each answer under the base condition, medians over rounds."""
    found: dict[str, dict[Key, list[Json]]] = defaultdict(lambda: defaultdict(list))
    for row in results["answers"]:
        if row["condition"] == 0:
            found[row["setting"]][row["prompt"], row["turn"]].append(row)
    return {
        setting: {key: (float(rows[0]["tokens"]), median(row["e2e_ms"] for row in rows)) for key, rows in by.items()}
        for setting, by in found.items()
    }


def _columns(times: dict[Key, tuple[float, float]], keys: list[Key]) -> tuple[Column, Column]:
    pairs = np.array([times[key] for key in keys])
    return pairs[:, 0], pairs[:, 1]


Run = tuple[tuple[Column, Column], tuple[Column, Column]]  # a setting and plain decoding: tokens, milliseconds


def _change(bootstrap: Bootstrap, first: Run, second: Run) -> Interval:
    """The second run's speed-up over the first's."""

    def speedup(weights: Column, run: Run) -> Column:
        (tokens, ms), (plain_tokens, plain_ms) = run
        found: Column = (weights @ tokens * (weights @ plain_ms)) / (weights @ ms * (weights @ plain_tokens))
        return found

    return bootstrap.interval(lambda weights: speedup(weights, second) / speedup(weights, first))


def _verdict(name: str, change: Interval) -> str:
    if change.below_one:
        return f"{name} gains less in the second run: {100 * (change.value - 1):+.1f}%"
    if change.above_one:
        return f"{name} gains more in the second run: {100 * (change.value - 1):+.1f}%"
    return f"{name}: no difference shown ({100 * (change.value - 1):+.1f}%)"


def _speed(columns: tuple[Column, Column]) -> float:
    return round(1000 * float(columns[0].sum() / columns[1].sum()), 2)


def _notes(first: Json, second: Json) -> list[str]:
    """What else differs between the runs."""
    found = []
    for what in ("model", "workload"):
        a, b = first.get(what, {}), second.get(what, {})
        found += [f"{what} {key}: {a.get(key)} and {b.get(key)}" for key in a if a.get(key) != b.get(key)]
    a, b = first.get("machine", {}), second.get("machine", {})
    found += [f"{key}: {a.get(key)} and {b.get(key)}" for key in ("cpu", "cores", "gpus") if a.get(key) != b.get(key)]
    return found
