"""`slipstream train`: a drafter for a model, from what that model wrote."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.commands.demo import executable
from slipstream.commands.opening import fetch_models
from slipstream.commands.options import Described
from slipstream.commands.synth import synth
from slipstream.commands.terminal import mebibytes, note, passing, print_json, say, show_table
from slipstream.errors import OptionError
from slipstream.folders import cache_directory, expanded
from slipstream.models.builtin import DEFAULT_MODEL
from slipstream.train.course import MINUTES, Course

if TYPE_CHECKING:
    from slipstream.drafters.trained import Trained

_COUNT_CPU = 1000  # conversations that are written first on a CPU where no data is given; a GPU writes synth's default
_SHOW_EVERY = 0.2, 10.0  # seconds between two lines of progress: where somebody looks, and elsewhere
_DEFAULT = Course()


def train(
    method: Annotated[str, Described("the drafter to train, such as eagle3", metavar="METHOD", positional=True)],
    model: Annotated[
        str, Described("the target: built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")
    ] = DEFAULT_MODEL,
    data: Annotated[
        tuple[str, ...], Described("what slipstream synth wrote with this target (repeatable)", metavar="DIR")
    ] = (),
    prompts: Annotated[
        str | None, Described("a file of prompts for the target to answer first (as in synth)", metavar="FILE")
    ] = None,
    output: Annotated[
        str | None,
        Described("checkpoint to make, or to go on with (default: where run looks for it)", ("--output", "-o"), "DIR"),
    ] = None,
    minutes: Annotated[float | None, Described(f"how long it may take (default: {MINUTES:g})")] = None,
    steps: Annotated[int | None, Described("how many steps, instead of minutes")] = None,
    settings: Annotated[
        tuple[str, ...], Described("a setting of the method (repeatable)", ("--set",), "NAME=VALUE")
    ] = (),
    init: Annotated[
        str | None, Described("start from a checkpoint, or (a method's name) from the one found", metavar="FROM")
    ] = None,
    restart: Annotated[bool, Described("forget what an interrupted training left behind")] = False,
    joint: Annotated[bool, Described("tune the target, too: the result is another model (lossy)")] = False,
    model_out: Annotated[
        str | None, Described("where that model goes (default: beside the checkpoint)", metavar="DIR")
    ] = None,
    tokens: Annotated[int, Described("of a batch, filling included (0: what suits the device)")] = _DEFAULT.tokens,
    longest: Annotated[int, Described("texts are cut to so many tokens")] = _DEFAULT.longest,
    rate: Annotated[float, Described("of learning, at its highest")] = _DEFAULT.rate,
    seed: Annotated[int, Described("of the first weights and of the order of the texts")] = _DEFAULT.seed,
    evaluate: Annotated[
        int, Described("steps from one examination to the next (0: about twenty in all)")
    ] = _DEFAULT.evaluate,
    patience: Annotated[
        int, Described("examinations without a new best after which it stops (0: it does not)")
    ] = _DEFAULT.patience,
    save: Annotated[int, Described("steps from one safe point to the next")] = _DEFAULT.save,
    examined: Annotated[int, Described("held-out prompts of an examination")] = _DEFAULT.prompts,
    answer: Annotated[int, Described("tokens of each answer in it")] = _DEFAULT.answer,
    dtype: Annotated[str, Described("auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, Described("auto, cpu, cuda or cuda:N")] = "auto",
    threads: Annotated[int | None, Described("CPU threads (default: torch's choice)")] = None,
    as_json: Annotated[bool, Described("print the figures as JSON", ("--json",))] = False,
) -> None:
    """Train a drafter for a model; the same command goes on with what was interrupted."""
    course = Course(
        steps=_asked("steps", steps),
        minutes=_asked("minutes", minutes),
        tokens=tokens,
        longest=longest,
        rate=rate,
        seed=seed,
        evaluate=evaluate,
        patience=patience,
        save=save,
        prompts=examined,
        answer=answer,
    )
    if data and prompts is not None:
        raise OptionError("give either --data or --prompts, not both")
    if threads is not None and threads < 1:
        raise OptionError(f"threads={threads} is out of range", hint="valid: 1 or more")
    with passing("loading torch ..."):
        import torch

        from slipstream.drafters import DrafterSpec
        from slipstream.train.joint import JointSettings, require_places, split_settings, train_jointly
        from slipstream.train.run import Order, require_method, require_possible
        from slipstream.train.run import train as run_training
        from slipstream.train.settings import parsed
        from slipstream.train.trainer import Watch
    require_places(joint, output, model_out)
    tuning, asked = split_settings(method, parsed(settings)) if joint else (JointSettings(), parsed(settings))
    chosen = require_method(method, asked)
    if threads is not None:
        torch.set_num_threads(threads)
    fetch_models(model, DrafterSpec("none"))
    out = None if output is None else expanded(output)
    texts = tuple(expanded(place) for place in data)
    order = Order(method, texts, out, model, init or "", chosen, course, restart, device, dtype)
    if not data:
        require_possible(order)
        order = replace(order, data=(_written(model, prompts, out, dtype, device),))
    live = _Live()
    made = None
    try:
        if joint:
            place_of_model = None if model_out is None else Path(model_out)
            made, place, drafter = train_jointly(order, tuning, Watch(live.tell, live.show), place_of_model)
        else:
            place, drafter = run_training(order, Watch(live.tell, live.show))
    except KeyboardInterrupt:
        live.tell(f"stopped; the same command goes on from the last safe point (there is one every {save} steps)")
        raise
    if as_json:
        tuned = {} if made is None else {"model": str(made), "joint": drafter.provenance["joint"]}
        print_json({"place": str(place), **tuned, **drafter.figures}, indent=2)
    else:
        _print(place, drafter, model if made is None else str(made), output)


def _asked(name: str, value: Any) -> Any:
    """A limit that was given must be one: 0 stands for none only where nothing was said."""
    if value is not None and value <= 0:
        raise OptionError(f"{name}={value} is out of range", hint="valid: above 0")
    return value or 0


def _written(model: str, prompts: str | None, out: Path | None, dtype: str, device: str) -> Path:
    """Data that the target writes now, or wrote for a training like this one before."""
    from slipstream.models.load import choose_device
    from slipstream.tuning.prompts import read_dialogues

    if prompts is not None:
        read_dialogues(expanded(prompts))  # whatever is wrong with the file is told first
    if out is None:
        asked = b"" if prompts is None else expanded(prompts).read_bytes()
        target = Path(model).resolve() if Path(model).exists() else model
        name = hashlib.sha256(f"{target}\n{dtype}\n{choose_device(device)}\n".encode() + asked).hexdigest()[:16]
        place = cache_directory() / "data" / name
    else:
        place = out.with_name(f"{out.name}-data")
    count = _COUNT_CPU if prompts is None and choose_device(device) == "cpu" else None
    note(f"the target writes what is to be learnt first: {place}", "bold")
    with contextlib.redirect_stdout(sys.stderr):  # what training prints at its end may be read by a program
        synth(str(place), model, count, prompts, dtype=dtype, device=device)
    return place


class _Live:
    """Lines that stay, and one that the next replaces where somebody looks."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0

    def tell(self, line: str) -> None:
        self._wipe()
        note(line, "bold")

    def show(self, line: str) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SHOW_EVERY[0 if self._terminal else 1]
        self._wipe()
        if self._terminal:
            print(line[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
        else:
            note(line)

    def _wipe(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print(place: Path, drafter: Trained, model: str, output: str | None) -> None:
    from slipstream.drafters.trained import WEIGHTS
    from slipstream.train.joint_notice import summary

    figures, training = drafter.figures, drafter.provenance["training"]
    rows = [["the default tree", f"{figures['tokens_per_step']:.2f}"]]
    rows.append(["a chain", f"{figures['chain']['tokens_per_step']:.2f}"])
    rows.extend([f"a tree of {nodes} nodes", f"{value:.2f}"] for nodes, value in figures["nodes"].items())
    show_table(["held-out prompts, greedy", "tokens per step"], rows, right=[1])
    shares = " ".join(f"{share:.2f}" for share in figures["accepted_by_depth"])
    say(f"\naccepted by depth: {shares}")
    size = mebibytes((place / WEIGHTS).stat().st_size)
    took = f"{training['steps']:,} steps, {training['minutes']:g} minutes"
    peak = f", {mebibytes(training['peak_memory_bytes'])} of GPU memory" if training["peak_memory_bytes"] else ""
    say(f"{took}{peak}; stored as {figures['stored_as']}, {size}")
    say(f"saved: {place} (report.html shows how it went)")
    if "joint" in drafter.provenance:
        say(f"{summary(drafter.provenance['joint'])} (README.txt in {model})", "bad")
    choice = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    drafted = drafter.method if output is None else f"{drafter.method}:checkpoint={place}"
    say("use it:")
    say(f"  {executable()} run{choice} --speculate {shlex.quote(drafted)} 'Why is the sky blue?'", "bold")
