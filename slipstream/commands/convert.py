"""`slipstream import` and `slipstream export`: trained drafters from and for other projects."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from slipstream.commands.demo import executable
from slipstream.commands.opening import open_llm
from slipstream.commands.options import Described, EngineSetup
from slipstream.commands.terminal import mebibytes, note, passing, say
from slipstream.errors import OptionError
from slipstream.folders import expanded
from slipstream.models.builtin import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


def import_(
    directory: Annotated[
        str, Described("directory with an EAGLE-3 or Medusa drafter of another project", metavar="DIR", positional=True)
    ],
    output: Annotated[str, Described("directory to make", ("--output", "-o"), "DIR")],
    model: Annotated[
        str, Described("the target: built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")
    ] = DEFAULT_MODEL,
) -> None:
    """Take over a drafter that was trained with another project, number by number."""
    place = _free(output)
    with passing("loading torch ..."):
        from slipstream.drafters import trained
        from slipstream.train.foreign import read_foreign
        from slipstream.train.interchange import import_drafter
    foreign = read_foreign(expanded(directory))
    target, name = _target(model)
    checkpoint = import_drafter(foreign, target, name)
    try:
        trained.save(place, checkpoint)
    except OSError as error:
        raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from None
    say(f"{place}: {checkpoint.method}, {len(checkpoint.vocab):,} draft tokens, {mebibytes(_size(place))}")
    choice = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    note(f"use it: {executable()} run{choice} --speculate {checkpoint.method}:checkpoint={shlex.quote(str(place))} ...")


def export(
    checkpoint: Annotated[
        str,
        Described(
            "directory of a trained drafter of ours, or a kind that the model has one of",
            metavar="CHECKPOINT",
            positional=True,
        ),
    ],
    output: Annotated[str, Described("directory to make", ("--output", "-o"), "DIR")],
    layout: Annotated[
        str, Described("speculators (EAGLE-3), vllm-medusa, or hf-model (draft_model)", ("--format",), "FORMAT")
    ],
    model: Annotated[
        str, Described("the target: built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")
    ] = DEFAULT_MODEL,
) -> None:
    """Write a trained drafter for another project, with all that ours borrow of the target."""
    place = _free(output)
    with passing("loading torch ..."):
        from slipstream.drafters import trained
        from slipstream.train.foreign import write_foreign
        from slipstream.train.interchange import FORMATS, export_drafter, load_for, named_for
    given = named_for(layout, checkpoint)
    target, _ = _target(model)
    source = given or trained.own(FORMATS[layout], target.fingerprint)
    foreign = export_drafter(load_for(layout, source), source, layout, target)
    write_foreign(place, foreign)
    say(f"{place}: {foreign.name} as {layout}, {len(foreign.weights)} weights, {mebibytes(_size(place))}")


def _free(output: str) -> Path:
    """Refuse a place that is taken, before anybody has waited for a model."""
    place = expanded(output)
    if place.exists():
        raise OptionError(f"{str(place)!r} is there already", hint="name a directory that does not exist")
    return place


def _target(model: str) -> tuple[TargetView, str]:
    """The target and its name, its weights as they are: on a GPU they might be rounded."""
    llm = open_llm(EngineSetup(model=model, speculate="none", quantize="none", device="cpu", dtype="float32"))
    return llm.engine.drafter.target, Path(llm.model.name).name


def _size(place: Path) -> int:
    return sum(file.stat().st_size for file in place.iterdir())
