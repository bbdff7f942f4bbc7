"""The state of a training on disk: a directory that appears atomically, and from which the training continues.

`state.json` has the numbers and the arguments, `tensors.safetensors` the weights, the best weights so far and the
optimiser state. Random numbers are not saved: they follow from the seed and the step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream.drafters.heads.head_checkpoint import write_tensors
from slipstream.errors import CorruptFile, OptionError

NUMBERS, TENSORS = "state.json", "tensors.safetensors"
_PARTIAL, _NAME = ".state", re.compile(r"state-(\d{9})")
_VERSION = 2
_ANEW = "--restart starts again"


@dataclass
class Record:
    """The progress of a training: everything that is not a tensor."""

    step: int = 0  # steps done
    epoch: int = 0
    place: int = 0  # batches of this epoch done
    seconds: float = 0.0
    tokens: int = 0  # tokens trained on so far
    best: float = 0.0  # tokens per step of the best weights
    best_step: int = -1  # -1: nothing has been evaluated
    losses: list[dict[str, Any]] = field(default_factory=list)  # step, loss, accuracy by depth
    marks: list[dict[str, Any]] = field(default_factory=list)  # step, seconds, and the `Score` of an evaluation
    begun_step: int = 0  # steps done, and seconds, when the present piece began
    begun_seconds: float = 0.0
    shards: list[str] = field(default_factory=list)  # shards of the data, in order


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class State:
    """A saved record and its tensors."""

    record: Record
    weights: Tensors
    best: Tensors
    memory: Tensors  # the optimiser state
    fixed: Tensors = field(default_factory=dict)  # choices that later pieces must keep
    arguments: dict[str, Any] = field(default_factory=dict)  # of the run that saved the state, if read from disk


def save(folder: Path, state: State, arguments: Mapping[str, Any]) -> None:
    """Write a state into `folder`; the previous one is deleted once the new one is complete."""
    partial = folder / f"{_PARTIAL}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    groups = {"weights": state.weights, "best": state.best, "memory": state.memory, "fixed": state.fixed}
    tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    write_tensors(partial / TENSORS, {name: tensor.detach().clone() for name, tensor in tensors.items()})
    numbers = {"version": _VERSION, "arguments": dict(arguments), "record": asdict(state.record)}
    (partial / NUMBERS).write_text(json.dumps(numbers, indent=1) + "\n")
    for file in (partial / TENSORS, partial / NUMBERS):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    old = _states(folder)
    place = folder / f"state-{state.record.step:09d}"
    if place in old:  # the same step again: the older state stays usable until this one is complete
        aside = folder / f"state-{max(0, state.record.step - 1):09d}"
        shutil.rmtree(aside, ignore_errors=True)
        place.rename(aside)
        old = [aside if former == place else former for former in old]
    partial.rename(place)
    for former in old:
        shutil.rmtree(former, ignore_errors=True)


def load(folder: Path, arguments: Mapping[str, Any] | None) -> State | None:
    """The state to continue from, or None. One of a training with other arguments is refused, if any are given."""
    states = _states(folder)
    if not states:
        return None
    place = states[-1]
    try:
        numbers = json.loads((place / NUMBERS).read_text())
        tensors = load_file(place / TENSORS)
        if numbers["version"] != _VERSION:
            raise ValueError(f"version {numbers['version']} of the format, but this program reads {_VERSION}")
        if arguments is not None:
            require_same(place, numbers["arguments"], arguments)
        groups: dict[str, Tensors] = {"weights": {}, "best": {}, "memory": {}, "fixed": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            groups[group][rest] = tensor
        return State(Record(**numbers["record"]), **groups, arguments=numbers["arguments"])
    except OptionError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())
        raise CorruptFile(f"{place} cannot be read: {what}", hint=_ANEW) from None


def clear(folder: Path) -> None:
    """Delete every state."""
    for place in _states(folder):
        shutil.rmtree(place)


def require_same(place: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue with other arguments than at the start; names the first difference."""
    now = json.loads(json.dumps(now))  # as read back from a file
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise OptionError(
                f"{place} was made with {name}={before.get(name)!r}, but now it is {now.get(name)!r}",
                hint=f"continue with the same arguments, or name another directory; {_ANEW}",
            )


def is_ours(name: str) -> bool:
    """Whether a training writes entries of this name into its folder."""
    return name.startswith(_PARTIAL) or _NAME.fullmatch(name) is not None


def _states(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(place for place in folder.glob("state-*") if _NAME.fullmatch(place.name))
