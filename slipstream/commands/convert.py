"""`slipstream import` and `slipstream export`: trained drafters from and to other projects."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from slipstream.commands.demo import executable
from slipstream.commands.shared.opening import open_llm
from slipstream.commands.shared.options import Described, EngineSetup, TargetName
from slipstream.commands.shared.terminal import mebibytes, note, say, temporary_line
from slipstream.errors import OptionError
from slipstream.folders import expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


def import_(
    directory: Annotated[
        str, Described("directory with an EAGLE-3 or Medusa drafter of another project", metavar="DIR", positional=True)
    ],
    output: Annotated[str, Described("directory to create", ("--output", "-o"), "DIR")],
    model: TargetName = DEFAULT_MODEL,
) -> None:
    """Import a drafter trained with another project, without changing its weights."""
    place = _free(output)
    with temporary_line("loading torch ..."):
        from slipstream.drafters.heads import head_checkpoint
        from slipstream.drafters.interchange import import_drafter
        from slipstream.drafters.interchange.foreign import read_foreign
    foreign = read_foreign(expanded(directory))
    target, name = _target(model)
    checkpoint = import_drafter(foreign, target, name)
    try:
        head_checkpoint.save(place, checkpoint)
    except OSError as error:
        raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from None
    say(f"{place}: {checkpoint.method}, {len(checkpoint.vocab):,} draft tokens, {mebibytes(_size(place))}")
    choice = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    note(f"use it: {executable()} run{choice} --speculate {checkpoint.method}:checkpoint={shlex.quote(str(place))} ...")


def export(
    checkpoint: Annotated[
        str,
        Described(
            "directory of a trained drafter, or a kind of which this model has one",
            metavar="CHECKPOINT",
            positional=True,
        ),
    ],
    output: Annotated[str, Described("directory to create", ("--output", "-o"), "DIR")],
    layout: Annotated[
        str, Described("speculators or sglang-eagle3, vllm-medusa, or hf-model (draft_model)", ("--format",), "FORMAT")
    ],
    model: TargetName = DEFAULT_MODEL,
) -> None:
    """Export a trained drafter to another project, with all that it shares with the target."""
    place = _free(output)
    with temporary_line("loading torch ..."):
        from slipstream.drafters.heads import head_checkpoint
        from slipstream.drafters.interchange.foreign import write_foreign
        from slipstream.train.interchange.export import FORMATS, export_drafter, load_for, named_for
    given = named_for(layout, checkpoint)
    target, _ = _target(model)
    source = given or head_checkpoint.own(FORMATS[layout], target.fingerprint)
    foreign = export_drafter(load_for(layout, source), source, layout, target)
    write_foreign(place, foreign)
    say(f"{place}: {foreign.name} as {layout}, {len(foreign.weights)} weights, {mebibytes(_size(place))}")


def _free(output: str) -> Path:
    """Refuse an existing path, before a model is loaded."""
    place = expanded(output)
    if place.exists():
        raise OptionError(f"{str(place)!r} exists", hint="name a directory that does not exist")
    return place


def _target(model: str) -> tuple[TargetView, str]:
    """The target and its name, with unquantized weights: on a GPU they might be rounded."""
    llm = open_llm(EngineSetup(model=model, speculate="none", quantize="none", device="cpu", dtype="float32"))
    return llm.target, Path(llm.model.name).name


def _size(place: Path) -> int:
    return sum(file.stat().st_size for file in place.iterdir())
