"""Batches as they are served: ordinary parameters, and requests that come and go. Whole runs, first pass and second."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.steps import standing
from benchmarks.gpu.timing import device_ms
from slipstream import LLM, SamplingParams

KINDS: dict[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.7": {"temperature": 0.7},
    "T 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T 0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "repetition 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
# Four plain greedy, four sampled with top-p, four with stop strings, two with penalties, two with log-probabilities.
MIXED: list[Mapping[str, Any]] = [
    *[{"temperature": 0.0}] * 4,
    *[{"temperature": 0.8, "top_p": 0.95}] * 4,
    *[{"temperature": 0.0, "stop": ["\x00 never said"]}] * 4,
    *[{"temperature": 0.0, "repetition_penalty": 1.05, "presence_penalty": 0.1}] * 2,
    *[{"temperature": 0.0, "logprobs": 5}] * 2,
]
_ROUNDS = 16  # timed


@dataclass(frozen=True)
class Sampling:
    """Milliseconds of one round with requests of one kind."""

    drafter: str
    batch: int
    nodes: int
    kind: str
    draft_ms: float
    verify_ms: float


def sampling(llm: LLM, drafter: str, kind: str, batch: int, context: int = 256) -> Sampling:
    """A round whose requests are all of one kind."""
    with standing(llm, drafter, context, batch, KINDS[kind]) as here:
        draft_ms = 0.0 if here.draft is None else device_ms(here.draft, _ROUNDS, here.back)
        return Sampling(drafter, batch, here.nodes, kind, draft_ms, device_ms(here.verify, _ROUNDS, here.back))


@dataclass(frozen=True)
class Served:
    """Requests of one run: tokens a second from the first arrival to the last token."""

    drafter: str
    load: str
    requests: int
    at_once: int
    passes: int  # which run over the same requests this is
    tok_s: float
    tokens_per_step: float
    largest_gap_ms: float  # between two steps of the engine that gave tokens


def served(
    llm: LLM, drafter: str, load: str, prompts: list[list[int]], how: list[SamplingParams], at_once: int, passes: int
) -> Served:
    """Answer all requests, `at_once` of them at a time: another one arrives whenever one has ended.

    `drafter` is in use already: another `use` would drop the graphs that a warm-up has made.
    """
    steps: list[float] = []
    step = llm.engine.step

    def timed() -> Any:
        progress = step()
        if progress:
            steps.append(time.perf_counter())
        return progress

    llm.engine.step = timed  # type: ignore[method-assign]
    try:
        torch.cuda.synchronize()
        began = time.perf_counter()
        outputs = [output for _, output in llm.answers(zip(prompts, how, strict=True), at_once)]
        seconds = time.perf_counter() - began
    finally:
        llm.engine.step = step  # type: ignore[method-assign]
    emitted, taken = (sum(getattr(o.stats, name) for o in outputs) for name in ("emitted", "steps"))
    gap = max((after - before for before, after in itertools.pairwise(steps)), default=0.0)
    count = len(prompts)
    return Served(drafter, load, count, at_once, passes, emitted / seconds, emitted / taken, 1000 * gap)


def lengths(count: int, kind: Mapping[str, Any]) -> list[SamplingParams]:
    """Answers of 40 to 225 tokens."""
    chooser = random.Random(count)
    return [
        SamplingParams(max_tokens=chooser.randrange(40, 226), ignore_eos=True, seed=i, **kind) for i in range(count)
    ]


def equal(kinds: list[Mapping[str, Any]], tokens: int) -> list[SamplingParams]:
    """Answers of one length."""
    return [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **kind) for i, kind in enumerate(kinds)]
