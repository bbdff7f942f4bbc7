"""`slipstream tune`: finds what drafts best for a model on given prompts, and writes it as a profile."""

from __future__ import annotations

import shlex
import time
from typing import Annotated

from slipstream import checks
from slipstream.commands.bench.options import BenchModel, numbers, writable
from slipstream.commands.demo import executable
from slipstream.commands.shared.options import Described, EngineSetup
from slipstream.commands.shared.terminal import print_json, say, show_table
from slipstream.errors import OptionError
from slipstream.folders import expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL

_BUDGET_S = 120.0
_PROFILE = "profile.toml"


def tune(
    setup: BenchModel | None = None,
    method: Annotated[
        str | None, Described("search the settings of one method instead: layer_skip", metavar="METHOD")
    ] = None,
    prompts: Annotated[
        str | None, Described(".jsonl or .txt with your own prompts (default: the workload of bench)", metavar="FILE")
    ] = None,
    concurrency: Annotated[str, Described("requests at once, as in 1,8,32", metavar="LIST")] = "1",
    minutes: Annotated[float, Described("time limit in minutes, loading included")] = 10.0,
    tokens: Annotated[int, Described("longest answer, unless a prompt's line says otherwise")] = 128,
    draft_model: Annotated[str | None, Described("a smaller model to try as well", metavar="MODEL")] = None,
    budget: Annotated[
        float | None, Described("time limit in seconds, with --method (default: 120)", metavar="SECONDS")
    ] = None,
    output: Annotated[
        str | None,
        Described(f"the profile (default: {_PROFILE}); with --method, its finding", ("--output", "-o"), "FILE"),
    ] = None,
    as_json: Annotated[bool, Described("print the finding as JSON", ("--json",))] = False,
) -> None:
    """Find what drafts best for a model on your prompts, and write a profile for `run`, `chat` and `serve`."""
    began, setup = time.monotonic(), setup or BenchModel()
    if method is not None:
        from slipstream.commands.tune.layers import tune_method

        engine = EngineSetup(
            model=setup.model,
            speculate="none",
            dtype=setup.dtype,
            device=setup.device,
            quantize=setup.quantize,
            exact=setup.exact,
            threads=setup.threads,
        )
        tune_method(method, engine, prompts, _BUDGET_S if budget is None else budget, output, as_json)
        return
    if budget is not None:
        raise OptionError("--budget belongs to --method", hint="use --minutes")
    batches = numbers("concurrency", concurrency, int, 1)
    deadline = began + 60 * checks.number("minutes", minutes, 0.01, 100_000)
    place = writable(_PROFILE if output is None else output)
    from slipstream.bench.prompts import read_file, workload
    from slipstream.commands.tune.settings import tune_settings

    asked = workload() if prompts is None else read_file(expanded(prompts))
    found = tune_settings(setup, asked, batches, deadline, checks.integer("tokens", tokens, 1), draft_model, place)
    if as_json:
        print_json(found, indent=1)
        return
    tried = sorted(found["tried"].items(), key=lambda pair: -pair[1])
    rows = [[name, f"{speed:.2f}x"] for name, speed in tried]
    show_table(["tried", "speed-up until it was dropped"], rows, right=[1])
    say("")
    for line in found["advice"]:
        say(line)
    say(f"\nrecommended: {found['speculate']}", "bold")
    choice = "" if setup.model == DEFAULT_MODEL else f" -m {shlex.quote(setup.model)}"
    say(f"  {executable()} run{choice} --profile {shlex.quote(str(place))} 'Why is the sky blue?'", "bold")
