"""A training in pieces: several runs, each of which continues from the state that the previous one saved.

The first piece fixes the settings, the draft vocabulary and the held-out chats. The same held-out chats select the best
weights of all pieces. Data may be added but not removed: chats are identified by their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import OptionError
from slipstream.train import state
from slipstream.train.state import Record, State

_SETTING = "set "  # prefix of a method's setting among the arguments of a state


def earlier_piece(out: Path, method: str, target: str, settings: Mapping[str, object]) -> State:
    """The state in `out` that a run for this method and target continues; `settings`: those that were given again."""
    former = state.load(out, None)
    if former is None or not former.fixed:
        raise OptionError(
            f"{str(out)!r} has no state to resume",
            hint="a training leaves one with --piece; a finished checkpoint is gone on with by --init",
        )
    given = {"method": method, "target": target, **{_SETTING + name: value for name, value in settings.items()}}
    state.require_same(out, {name: former.arguments.get(name) for name in given}, given)
    return former


def settings_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The method's settings among the arguments of a state."""
    return {name.removeprefix(_SETTING): value for name, value in arguments.items() if name.startswith(_SETTING)}


def same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether arguments are those of a state that was read from a file."""
    given: dict[str, Any] = json.loads(json.dumps(now))
    return before == given


def bring_in(record: Record, shards: Sequence[str]) -> None:
    """Train on these shards from now on; if there are new ones, an epoch over all shards begins."""
    if record.shards and record.shards != list(shards):
        record.epoch, record.place = record.epoch + 1, 0
    record.shards = list(shards)


def reached(record: Record) -> dict[str, Any]:
    """The result of a piece that has ended."""
    return {"tokens_per_step": record.best, "best_step": record.best_step, "steps": record.step}
