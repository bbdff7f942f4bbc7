"""Compares two results prompt by prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from statistics import median
from typing import Any

import numpy as np

from slipstream.bench.compare_servers import compare_servers
from slipstream.bench.condition_table import ALL, LOOPING
from slipstream.bench.intervals import Bootstrap, Column, Interval
from slipstream.bench.schedule import PLAIN
from slipstream.errors import OptionError

Json = dict[str, Any]
Key = tuple[str, int]  # prompt, turn


def compare_results(first: Json, second: Json) -> Json:
    """For each setting of both runs' base conditions: speed-ups, and how the second's relate to the first's.

    Changes are those of prompts in common, relative to plain decoding's: what slowed a machine down cancels.
    Plain decoding itself is compared by its tokens per second, which shows whether the machines were alike.
    Results of servers are compared by load.
    """
    if ("points" in first) != ("points" in second):
        raise OptionError("one result is of a server, the other of a model of its own process")
    if "points" in first:
        return compare_servers(first, second)
    a, b = _times(first), _times(second)
    settings = [name for name in first.get("settings", []) if name in b and name != PLAIN]
    if not settings:
        raise OptionError("the two results have no setting in common", hint="`none` alone is nothing to compare")
    keys = sorted(set.intersection(*(set(run[name]) for run in (a, b) for name in settings)))
    both_plain = set(keys) & set(a[PLAIN]) & set(b[PLAIN])
    if not both_plain:
        raise OptionError("the two results have no prompt in common")
    categories = {(row["prompt"], row["turn"]): row["category"] for row in first["answers"]}
    bootstrap = Bootstrap([categories[key] for key in keys])
    plain_a, plain_b = (_columns(run[PLAIN], keys, both_plain) for run in (a, b))
    rows = []
    for name in settings:
        change = _change(bootstrap, [_columns(run[name], keys) for run in (b, a)], [plain_b, plain_a])
        rows.append(
            {
                "setting": name,
                "first": _speedup(first, name),
                "second": _speedup(second, name),
                "change": list(change),
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


Columns = tuple[Column, Column]  # tokens, milliseconds


def _columns(times: dict[Key, tuple[float, float]], keys: list[Key], known: Collection[Key] | None = None) -> Columns:
    """Of prompts that are not `known`, zeros: plain decoding may have been asked fewer of them."""
    pairs = np.array([times[key] if known is None or key in known else (0.0, 0.0) for key in keys])
    return pairs[:, 0], pairs[:, 1]


def _change(bootstrap: Bootstrap, mine: list[Columns], plain: list[Columns]) -> Interval:
    """The second run's speed-up over the first's: the setting's own change over that of plain decoding."""

    def faster(weights: Column, runs: list[Columns]) -> Column:
        (tokens, ms), (tokens_before, ms_before) = runs
        found: Column = (weights @ tokens * (weights @ ms_before)) / (weights @ ms * (weights @ tokens_before))
        return found

    return bootstrap.interval(lambda weights: faster(weights, mine) / faster(weights, plain))


def _speedup(results: Json, name: str) -> list[float | None]:
    """What a run itself says, over all prompts that it asked; of looping answers if there are no others."""
    figures = results["conditions"][0]["figures"][name]
    found: list[float | None] = (figures[ALL] or figures[LOOPING])["speedup"]
    return found


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
