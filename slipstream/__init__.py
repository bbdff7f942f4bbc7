"""Slipstream: speculative decoding. A language model answers faster, and its output does not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slipstream.async_llm import AsyncLLM
    from slipstream.errors import SlipstreamError
    from slipstream.llm import LLM
    from slipstream.tree import TokenTree
    from slipstream.types import Completion, Delta, Logprob, Output, Plan, RequestMetrics, SamplingParams, Stats

# Public name -> module. Loaded when first used: `slipstream --help` must not wait for torch.
_HOMES = {
    "LLM": "slipstream.llm",
    "AsyncLLM": "slipstream.async_llm",
    "SlipstreamError": "slipstream.errors",
    "TokenTree": "slipstream.tree",
    **dict.fromkeys(
        ("Completion", "Delta", "Logprob", "Output", "Plan", "RequestMetrics", "SamplingParams", "Stats"),
        "slipstream.types",
    ),
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Delta",
    "Logprob",
    "Output",
    "Plan",
    "RequestMetrics",
    "SamplingParams",
    "SlipstreamError",
    "Stats",
    "TokenTree",
    "__version__",
]


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
