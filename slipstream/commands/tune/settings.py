"""The part of `slipstream tune` that tries drafters and tree sizes on given prompts."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from slipstream import checks
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import PLAIN, conditions
from slipstream.bench.tune.candidates import methods, untrained
from slipstream.bench.tune.halving import AUTO, Halving
from slipstream.bench.tune.profile import advice, save_profile
from slipstream.commands.bench.options import BenchModel
from slipstream.commands.shared.opening import fetch_models
from slipstream.commands.shared.terminal import note, temporary_line
from slipstream.drafters.registry import parse_speculate
from slipstream.errors import OptionError
from slipstream.llm import LLM
from slipstream.native.machine import cpu_model


def tune_settings(
    setup: BenchModel,
    prompts: list[BenchPrompt],
    concurrency: list[int],
    deadline: float,
    tokens: int,
    draft_model: str | None,
    output: Path,
) -> dict[str, Any]:
    """Search, write the profile, and return what was found."""
    if setup.threads is not None:
        torch.set_num_threads(checks.integer("threads", setup.threads, 1))

    def opened(settings: list[str]) -> LLM:
        for name in settings:
            fetch_models(setup.model, parse_speculate(name))
        with temporary_line(f"loading {setup.model} ..."):
            return LLM(
                setup.model,
                speculate=None,
                drafters=settings,
                verifier=setup.verifier,
                dtype=setup.dtype,
                device=setup.device,
                quantize=setup.quantize,
                exact=setup.exact,
                max_model_len=setup.max_model_len,
                max_num_seqs=max(64, *concurrency),
            )

    with opened([PLAIN]) as llm:
        if llm.tokenizer is None:
            raise OptionError(f"{llm.model.name} has no tokenizer, so it cannot read prompts")
        fingerprint, name = llm.model.fingerprint, llm.model.name
    candidates = methods(fingerprint, draft_model)
    note(f"{len(candidates)} ways to draft: {', '.join(candidates)}")
    halving = Halving(opened, prompts, conditions(concurrency), tokens, note)
    began = time.monotonic()
    finding = halving.search(candidates, deadline)
    facts = {
        "model": name,
        "fingerprint": fingerprint,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model(),
        "seconds": round(time.monotonic() - began),
    }
    save_profile(finding, facts, output)
    best_of = {condition: list(speeds[finding.best]) for condition, speeds in finding.speedups.items()}
    return {
        **facts,
        "speculate": finding.best,
        "speedup": best_of,
        "over_auto": {condition: list(speed) for condition, speed in finding.over_auto.items()},
        "auto": {condition: list(speeds[AUTO]) for condition, speeds in finding.speedups.items()},
        "by_category": {name: list(speed) for name, speed in finding.by_category.items()},
        "tried": finding.tried,
        "advice": advice(finding, untrained=untrained(fingerprint)),
        "profile": str(output),
    }
