"""The part of `slipstream bench` that measures a model of this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from slipstream import checks
from slipstream.bench.machine_costs import measure_costs
from slipstream.bench.measure import Run, check_settings
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.results import provenance
from slipstream.bench.samples import take_samples
from slipstream.bench.schedule import Condition, conditions
from slipstream.bench.session import results, run_bench
from slipstream.bench.traces import Traces
from slipstream.bench.traces import save as save_traces
from slipstream.commands.bench.options import BenchModel, Limits, Sweeps, numbers
from slipstream.commands.shared.opening import fetch_models
from slipstream.commands.shared.progress import TimeBar
from slipstream.commands.shared.terminal import note, temporary_line
from slipstream.drafters.registry import DEFAULT, parse_speculate
from slipstream.llm import LLM

_LEARNS = "shared"  # the option of drafters that remember earlier answers
_CACHE_TOKENS = 32_768  # the engine's default
_REQUEST_TOKENS = 2048  # cache per request at once, without a sweep over contexts
_COSTS_SHARE = 0.2  # of the time, to measure passes for traces
_RESERVE_S = 1.5  # for figures and reports


def bench_engine(
    setup: BenchModel,
    sweeps: Sweeps,
    speculate: Sequence[str],
    prompts: list[BenchPrompt],
    limits: Limits,
    given: dict[str, Any],
) -> dict[str, Any]:
    """Load the model with all drafters, measure, and put the results together."""
    asked = conditions(
        numbers("batch", sweeps.batch, int, 1),
        numbers("context", sweeps.context, int, 1),
        numbers("temperature", sweeps.temperature, float, 0),
        numbers("nodes", sweeps.nodes, int, 1),
    )
    settings = check_settings(speculate or [DEFAULT])
    llm = _open(setup, settings, asked)
    run = Run(llm, prompts, settings, asked, limits.tokens, traces=None if limits.trace is None else [])
    if run.fitting and run.skipped:
        note(f"{len(run.skipped)} prompts are too long for the model and are left out; results.json names them")
    with temporary_line("warming up ..."):
        run.warm_up()
        samples = take_samples(run)
    specs = map(parse_speculate, settings)
    repeats = not any(part.options.get(_LEARNS) in (True, "true") for spec in specs for part in spec.parts())
    deadline = limits.deadline - _RESERVE_S
    if limits.trace is not None:
        deadline -= _COSTS_SHARE * (deadline - time.monotonic())
    with TimeBar("measuring", deadline - time.monotonic()) as bar:
        run_bench(
            run,
            deadline,
            limits.precision,
            lambda status: bar.update(f"{status.answers} answers", status.text),
            repeats=repeats,
        )
    if limits.trace is not None:
        with temporary_line("measuring the costs of passes ..."):
            _save_traces(run, limits)
    llm.close()
    return {**results(run, provenance(given), limits.price), "samples": samples}


def _save_traces(run: Run, limits: Limits) -> None:
    """Write the traces with this machine's costs."""
    assert limits.trace is not None and run.traces is not None
    seconds = max(1.0, limits.deadline - _RESERVE_S - time.monotonic())
    costs = measure_costs(run.llm, run.answers, run.conditions, seconds)
    save_traces(Traces({"model": run.llm.model.name, "costs": costs.as_dict()}, run.traces), limits.trace)


def _open(setup: BenchModel, settings: list[str], asked: list[Condition]) -> LLM:
    """The model with every setting loaded."""
    import torch

    from slipstream.verify import make_verifier

    make_verifier(setup.verifier)
    if setup.threads is not None:
        torch.set_num_threads(checks.integer("threads", setup.threads, 1))
    loaded = list(dict.fromkeys(condition.setting(name) for condition in asked for name in settings))
    for name in loaded:
        fetch_models(setup.model, parse_speculate(name))
    batch = max(condition.batch for condition in asked)
    longest = max(condition.context or 0 for condition in asked) + _REQUEST_TOKENS
    with temporary_line(f"loading {setup.model} ..."):
        return LLM(
            setup.model,
            speculate=None,
            drafters=loaded,
            verifier=setup.verifier,
            dtype=setup.dtype,
            device=setup.device,
            quantize=setup.quantize,
            exact=setup.exact,
            max_model_len=setup.max_model_len,
            max_num_seqs=max(64, batch),
            cache_tokens=None if batch * longest <= _CACHE_TOKENS else batch * longest,
        )
