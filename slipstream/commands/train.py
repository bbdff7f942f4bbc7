"""`slipstream train`: trains a drafter for a model, on that model's own answers."""

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

from slipstream import checks
from slipstream.commands.demo import executable
from slipstream.commands.shared.opening import fetch_models
from slipstream.commands.shared.options import Described, TargetName
from slipstream.commands.shared.terminal import mebibytes, note, print_json, say, show_table, temporary_line
from slipstream.commands.synth import synth
from slipstream.errors import OptionError
from slipstream.folders import cache_directory, expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.train.config import MINUTES, TrainConfig

if TYPE_CHECKING:
    from slipstream.drafters.heads.head_checkpoint import Trained

_COUNT_CPU = 1000  # conversations written first on a CPU if no data is given; a GPU writes synth's default
_SHOW_EVERY = 0.2, 10.0  # seconds between two lines of progress: in a terminal, and elsewhere
_DEFAULT = TrainConfig()


def train(
    method: Annotated[str, Described("the drafter to train, such as eagle3", metavar="METHOD", positional=True)],
    model: TargetName = DEFAULT_MODEL,
    data: Annotated[
        tuple[str, ...], Described("data of slipstream synth for this target (repeatable)", metavar="DIR")
    ] = (),
    prompts: Annotated[
        str | None, Described("file of prompts that the target answers first (as in synth)", metavar="FILE")
    ] = None,
    output: Annotated[
        str | None,
        Described("checkpoint to create or continue (default: where run looks for it)", ("--output", "-o"), "DIR"),
    ] = None,
    minutes: Annotated[float | None, Described(f"time limit in minutes (default: {MINUTES:g})")] = None,
    steps: Annotated[int | None, Described("number of steps, instead of minutes")] = None,
    settings: Annotated[
        tuple[str, ...], Described("a setting of the method (repeatable)", ("--set",), "NAME=VALUE")
    ] = (),
    init: Annotated[
        str | None, Described("start from a checkpoint, or (a method's name) from this model's own", metavar="FROM")
    ] = None,
    restart: Annotated[bool, Described("discard the state of an interrupted training")] = False,
    resume: Annotated[bool, Described("go on from the last piece; the data may have grown")] = False,
    piece: Annotated[bool, Described("end with a state that --resume continues, and no checkpoint yet")] = False,
    joint: Annotated[bool, Described("tune the target too: the result is another model (lossy)")] = False,
    model_out: Annotated[
        str | None, Described("directory of that model (default: beside the checkpoint)", metavar="DIR")
    ] = None,
    tokens: Annotated[int, Described("tokens per batch, padding included (0: device default)")] = _DEFAULT.tokens,
    longest: Annotated[int, Described("texts are cut to so many tokens")] = _DEFAULT.longest,
    rate: Annotated[float, Described("highest learning rate")] = _DEFAULT.rate,
    seed: Annotated[int, Described("seed of the initial weights and of the order of the texts")] = _DEFAULT.seed,
    evaluate: Annotated[int, Described("steps between evaluations (0: about twenty in all)")] = _DEFAULT.evaluate,
    patience: Annotated[
        int, Described("stop after so many evaluations without a new best (0: never)")
    ] = _DEFAULT.patience,
    save: Annotated[int, Described("steps between saved states")] = _DEFAULT.save,
    examined: Annotated[int, Described("held-out prompts per evaluation")] = _DEFAULT.prompts,
    answer: Annotated[int, Described("tokens of each answer in an evaluation")] = _DEFAULT.answer,
    dtype: Annotated[str, Described("auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, Described("auto, cpu, cuda or cuda:N")] = "auto",
    threads: Annotated[int | None, Described("CPU threads (default: torch's choice)")] = None,
    as_json: Annotated[bool, Described("print the figures as JSON", ("--json",))] = False,
) -> None:
    """Train a drafter for a model; the same command continues an interrupted training."""
    config = TrainConfig(
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
    if threads is not None:
        checks.integer("threads", threads, 1)
    with temporary_line("loading torch ..."):
        import torch

        from slipstream.drafters import DrafterSpec
        from slipstream.train.joint.run import JointSettings, require_places, split_settings, train_jointly
        from slipstream.train.run import TrainJob, require_method, require_possible
        from slipstream.train.run import train as run_training
        from slipstream.train.settings import parsed
        from slipstream.train.trainer import ProgressSink
    require_places(joint, output, model_out)
    tuning, asked = split_settings(method, parsed(settings)) if joint else (JointSettings(), parsed(settings))
    chosen = require_method(method, asked)
    if threads is not None:
        torch.set_num_threads(threads)
    fetch_models(model, DrafterSpec("none"))
    out = None if output is None else expanded(output)
    texts = tuple(expanded(place) for place in data)
    job = TrainJob(method, texts, out, model, init or "", chosen, config, restart, device, dtype, resume, piece)
    if not data:
        require_possible(job)
        job = replace(job, data=(_written(model, prompts, out, dtype, device),))
    live = _Live()
    made = None
    try:
        if joint:
            place_of_model = None if model_out is None else Path(model_out)
            made, place, drafter = train_jointly(job, tuning, ProgressSink(live.tell, live.show), place_of_model)
        else:
            place, drafter = run_training(job, ProgressSink(live.tell, live.show))
    except KeyboardInterrupt:
        live.tell(f"stopped; the same command continues from the last saved state (one every {save} steps)")
        raise
    if piece:
        _print_piece(place, drafter, as_json)
    elif as_json:
        tuned = {} if made is None else {"model": str(made), "joint": drafter.provenance["joint"]}
        print_json({"place": str(place), **tuned, **drafter.figures}, indent=2)
    else:
        _print(place, drafter, model if made is None else str(made), output)


def _asked(name: str, value: Any) -> Any:
    """Refuse a given limit of 0: only the default 0 means none."""
    checks.require(value is None or value > 0, name, value, "above 0")
    return value or 0


def _written(model: str, prompts: str | None, out: Path | None, dtype: str, device: str) -> Path:
    """Data that the target writes now, or wrote for an earlier training like this one."""
    from slipstream.bench.tune.prompts import read_dialogues
    from slipstream.models.load import choose_device

    if prompts is not None:
        read_dialogues(expanded(prompts))  # errors in the file come first
    if out is None:
        asked = b"" if prompts is None else expanded(prompts).read_bytes()
        target = Path(model).resolve() if Path(model).exists() else model
        name = hashlib.sha256(f"{target}\n{dtype}\n{choose_device(device)}\n".encode() + asked).hexdigest()[:16]
        place = cache_directory() / "data" / name
    else:
        place = out.with_name(f"{out.name}-data")
    count = _COUNT_CPU if prompts is None and choose_device(device) == "cpu" else None
    note(f"the target first writes the training data: {place}", "bold")
    with contextlib.redirect_stdout(sys.stderr):  # a program may read stdout
        synth(str(place), model, count, prompts, dtype=dtype, device=device)
    return place


class _Live:
    """Permanent lines, and one that the next replaces in a terminal."""

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


def _print_piece(place: Path, drafter: Trained, as_json: bool) -> None:
    figures = drafter.figures
    if as_json:
        print_json({"place": str(place), **figures}, indent=2)
        return
    best = f"{figures['tokens_per_step']:.2f} tokens per step, at step {figures['best_step']:,}"
    say(f"{figures['steps']:,} steps so far; the best weights: {best}")
    say(f"saved: {place}; go on with --resume, and for the last piece without --piece")


def _print(place: Path, drafter: Trained, model: str, output: str | None) -> None:
    from slipstream.drafters.heads.head_checkpoint import WEIGHTS
    from slipstream.train.joint.notice import summary

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
    say(f"saved: {place} (report.html has the plots)")
    if "joint" in drafter.provenance:
        say(f"{summary(drafter.provenance['joint'])} (README.txt in {model})", "bad")
    choice = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    drafted = drafter.method if output is None else f"{drafter.method}:checkpoint={place}"
    say("use it:")
    say(f"  {executable()} run{choice} --speculate {shlex.quote(drafted)} 'Why is the sky blue?'", "bold")
