"""Writes what a search found as a profile (TOML), and says it in sentences."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.condition_table import ALL
from slipstream.bench.intervals import Interval
from slipstream.bench.schedule import PLAIN
from slipstream.bench.tune.halving import AUTO, Finding
from slipstream.errors import OptionError
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.profiles import FORMAT, VERSION

Facts = dict[str, Any]  # model, fingerprint, created, machine, ...


def advice(finding: Finding, heads: Collection[str], model: str = DEFAULT_MODEL) -> list[str]:
    """What was found, in sentences: the recommendation, where nothing helps, and what is worth training."""
    lines = []
    for condition, speeds in finding.speedups.items():
        best = speeds[finding.best]
        if best.above_one:
            lines.append(f"{condition}: {finding.best} is {_shown(best)} as fast as plain decoding")
        elif best.below_one:
            lines.append(f"{condition}: nothing helps; the best, {finding.best}, is slower ({_shown(best)})")
        else:
            lines.append(f"{condition}: no gain shown; the best, {finding.best}, gave {_shown(best)}")
        over = finding.over_auto[condition]
        if finding.best != AUTO:
            verb = "more than" if over.above_one else "less than" if over.below_one else "no different from"
            lines.append(f"{condition}: that is {verb} auto as it comes ({_shown(over)})")
    hopeless = [name for name, speed in finding.by_category.items() if not speed.above_one and speed.low is not None]
    if hopeless:
        lines.append(f"nothing is shown to help with: {', '.join(hopeless)}")
    return lines + _training(finding, heads, model)


def _training(finding: Finding, heads: Collection[str], model: str) -> list[str]:
    """Which head to train, by what was measured: the best one on your own text, or a first one."""
    measured = {name: speeds for name, speeds in finding.methods.items() if ALL in speeds}
    trained = [name for name in measured if name in heads]
    best = max(trained or measured, key=lambda name: measured[name][ALL].value, default=None)
    if best is None:
        return []
    of_model = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    gave = f"{best} gave {_shown(measured[best][ALL])} over all"
    by_category = {name: speed for name, speed in measured[best].items() if name != ALL}
    if len(by_category) > 1:
        weakest = min(by_category, key=lambda name: by_category[name].value)
        gave += f", least on {weakest}: {_shown(by_category[weakest])}"
    if not trained:
        lines = [f"no head was trained for this model; without one, {gave}"]
        return [*lines, f"  what a head adds: slipstream train eagle3{of_model}"]
    own = f"slipstream train {best}{of_model} --init {best} --data captured/"
    return [gave, f"  on text that `serve --capture captured/` kept, it can learn yours: {own}"]


def _shown(speed: Interval) -> str:
    return f"{speed.value:.2f}x" + ("" if speed.low is None else f" ({speed.low:.2f} to {speed.high:.2f})")


def save_profile(finding: Finding, facts: Facts, path: Path) -> None:
    """Write the profile."""
    lines = ["# made by `slipstream tune`; use it with --profile or LLM(profile=...)"]
    lines += _pairs({"format": FORMAT, "version": VERSION, "speculate": finding.recommended})
    lines += _pairs({"setup": finding.setup, **facts})
    for condition, speeds in finding.speedups.items():
        lines += ["", "[[measured]]", *_pairs({"condition": condition, "prompts": finding.prompts})]
        lines += _pairs({"speedup": _bounds(speeds[finding.recommended])})
        lines += _pairs({"over_auto": _bounds(_over_auto(finding, condition))})
    lines += ["", "[tried]", *_pairs(dict(sorted(finding.tried.items(), key=lambda pair: -pair[1])), quoted=True)]
    if finding.policy:
        lines += ["", "[policy] # priors (worth, record) and costs (passes, drafts), as the policy keeps them"]
        lines += _pairs(finding.policy)
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _over_auto(finding: Finding, condition: str) -> Interval:
    """The recommended setting over `auto`."""
    if finding.recommended == finding.best:
        return finding.over_auto[condition]
    if finding.recommended == AUTO:
        return Interval(1.0, 1.0, 1.0)
    assert finding.recommended == PLAIN
    value, low, high = finding.speedups[condition][AUTO]
    return Interval(1 / value, high and 1 / high, low and 1 / low)


def _bounds(speed: Interval) -> list[float]:
    return [round(bound, 4) for bound in speed if bound is not None]


def _pairs(values: dict[str, Any], *, quoted: bool = False) -> Sequence[str]:
    """Lines of TOML."""
    return [f"{json.dumps(name) if quoted else name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    """A value on one line: all but tables are written as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
