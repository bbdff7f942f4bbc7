"""Writes what a search found as a profile (TOML), and says it in sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.intervals import Interval
from slipstream.bench.tune.halving import AUTO, Finding
from slipstream.errors import OptionError
from slipstream.profiles import FORMAT, VERSION

Facts = dict[str, Any]  # model, fingerprint, created, machine, ...


def advice(finding: Finding, *, untrained: bool) -> list[str]:
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
    if untrained:
        lines.append("no head was trained for this model; eagle3 is the one to train: slipstream train eagle3 -m MODEL")
    return lines


def _shown(speed: Interval) -> str:
    return f"{speed.value:.2f}x" + ("" if speed.low is None else f" ({speed.low:.2f} to {speed.high:.2f})")


def save_profile(finding: Finding, facts: Facts, path: Path) -> None:
    """Write the profile."""
    lines = ["# made by `slipstream tune`; use it with --profile or LLM(profile=...)"]
    lines += _pairs({"format": FORMAT, "version": VERSION, "speculate": finding.best, "setup": finding.setup, **facts})
    for condition, speeds in finding.speedups.items():
        lines += ["", "[[measured]]", *_pairs({"condition": condition, "prompts": finding.prompts})]
        lines += _pairs({"speedup": _bounds(speeds[finding.best]), "over_auto": _bounds(finding.over_auto[condition])})
    lines += ["", "[tried]", *_pairs(dict(sorted(finding.tried.items(), key=lambda pair: -pair[1])), quoted=True)]
    if finding.policy:
        lines += ["", "[policy] # priors (worth, record) and costs (passes, drafts), as the policy keeps them"]
        lines += _pairs(finding.policy)
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


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
