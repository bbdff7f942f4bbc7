"""Verdicts: what the figures mean, in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.bench.condition_table import ALL
from slipstream.bench.intervals import Interval
from slipstream.bench.schedule import PLAIN

Figures = Mapping[str, Mapping[str, Mapping[str, Any] | None]]  # setting -> category -> figures

_FEW = 3  # prompts below which a category gives no verdict


def verdicts(figures: Figures, categories: Sequence[str]) -> dict[str, str]:
    """A sentence for all prompts together, and one for each category."""
    return {category: verdict(figures, category) for category in (ALL, *categories)}


def verdict(figures: Figures, category: str) -> str:
    """What the best setting does for a category, and which ones to leave off."""
    found = {
        setting: Interval(*each["speedup"])
        for setting, by_category in figures.items()
        if setting != PLAIN and (each := by_category.get(category)) is not None
    }
    if not found:
        return "no answer to judge by"
    prompts = max(each["prompts"] for s in figures if (each := figures[s].get(category)) is not None)
    best = max(found, key=lambda setting: found[setting].value)
    faster = found[best]
    if faster.low is None or prompts < _FEW:
        return f"{best} gave {faster.value:.2f}x on {_count(prompts)}: too few for a verdict"
    if faster.above_one:
        said = f"use {best}: {faster.value:.2f}x as fast ({_span(faster)})"
    elif faster.below_one:
        return f"do not draft: the best, {best}, is {_percent(1 - faster.value)} slower ({_span(faster)})"
    else:
        said = f"no gain shown: {best} gave {faster.value:.2f}x ({_span(faster)})"
    slower = [setting for setting, speed in found.items() if setting != best and speed.below_one]
    return said + (f"; leave out {', '.join(slower)}, which slow it down" if slower else "")


def _span(speed: Interval) -> str:
    return f"{speed.low:.2f} to {speed.high:.2f}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _count(prompts: int) -> str:
    return "1 prompt" if prompts == 1 else f"{prompts} prompts"
