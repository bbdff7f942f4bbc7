"""The cost of a round, split into drafting and verifying, at one context length and one batch size."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.timing import device_ms
from slipstream import LLM, SamplingParams
from slipstream.engine.burst import Burst
from slipstream.engine.extras import Level
from slipstream.policy.sizes import TREE_ROUNDS
from slipstream.sequence import Sequence

_ROUNDS = 16  # timed rounds
GREEDY: Mapping[str, Any] = {"temperature": 0.0}


def started(llm: LLM, prompts: list[list[int]], how: SamplingParams) -> list[Sequence]:
    """Sequences that have all had their first token."""
    sequences = [sequence for prompt in prompts for sequence in llm.sequences(prompt, how)]
    llm.engine.scheduler.add(sequences)
    while not all(sequence.first_token_at for sequence in sequences):
        llm.engine.step()
    return sequences


@dataclass(frozen=True)
class Step:
    """Milliseconds of one round."""

    drafter: str
    batch: int
    context: int
    nodes: int
    draft_ms: float
    verify_ms: float  # target pass, choice, walk to the next root
    capture_ms: float  # total capture time of this engine
    graph_mib: float  # memory of the graphs


@dataclass(frozen=True)
class Standing:
    """The halves of a round, for repeated runs."""

    burst: Burst
    nodes: int
    before: int  # bytes reserved on the device with the drafter, before any round
    draft: Callable[[], None] | None
    verify: Callable[[], None]
    back: Callable[[], None]  # resets the lanes, so that nothing runs past the pages


@contextmanager
def standing(
    llm: LLM, drafter: str, context: int, batch: int = 1, kind: Mapping[str, Any] = GREEDY, shape: int = 0
) -> Iterator[Standing]:
    """Rounds after `context` tokens. `kind`: how the requests sample. `shape`: one of those that `auto` picks from.

    The text is random: costs do not depend on it.
    """
    llm.use(drafter)
    burst = llm.burst
    assert burst is not None, f"{drafter} does not draft on the device"
    chance, vocab = random.Random(0), 40_000
    prompts = [[chance.randrange(1000, vocab) for _ in range(context)] for _ in range(batch)]
    before = torch.cuda.memory_reserved()
    burst.go_ahead = lambda launched: None  # type: ignore[method-assign]  # the host is to know where lanes stand
    # The first sequences of a large batch decode while the last prompts are read, and must not end meanwhile.
    length = 400 + 20 * batch
    sequences = started(llm, prompts, SamplingParams(ignore_eos=True, max_tokens=length, seed=0, **kind))
    for _ in range(2):  # the second round of a size is captured
        llm.engine.step()
    with torch.inference_mode():
        count = len(sequences)
        plan = replace((burst.shapes(count) or [burst.shape(count)])[shape], rounds=TREE_ROUNDS)
        burst.reserve(sequences, plan)
        buffers, *_ = burst.filled(sequences, plan)
        start = buffers.lanes.slots.clone()

        def back() -> None:
            buffers.lanes.slots.copy_(start)
            buffers.number.zero_()

        level = Level.of(sequences[0])
        sampled = not sequences[0].params.greedy
        draft = None if buffers.loop is None else lambda: burst.draft(buffers, sampled)
        try:
            yield Standing(burst, plan.nodes, before, draft, lambda: burst.verify(buffers, level, False), back)
        finally:
            for sequence in sequences:
                llm.engine.cancel(sequence)


def step(llm: LLM, drafter: str, context: int, batch: int = 1, shape: int = 0) -> Step:
    """Rounds after `context` tokens. `shape`: one of those that `auto` picks from."""
    with standing(llm, drafter, context, batch, shape=shape) as here:
        draft_ms = 0.0 if here.draft is None else device_ms(here.draft, _ROUNDS, here.back)
        verify_ms = device_ms(here.verify, _ROUNDS, here.back)
        graph_mib = max(0.0, (torch.cuda.memory_reserved() - here.before) / 2**20)
        capture_ms = here.burst.graphs.capture_ms
        return Step(drafter, batch, context, here.nodes, draft_ms, verify_ms, capture_ms, graph_mib)


@dataclass(frozen=True)
class Throughput:
    """All answers of a batch together."""

    drafter: str
    batch: int
    tok_s: float
    tokens_per_step: float
    step_ms: float
    gb_per_s: float  # bandwidth of the target's weights; a step reads them once


def throughput(llm: LLM, drafter: str, prompts: list[list[int]], tokens: int, weights: int) -> Throughput:
    """Answers to all prompts at once, from the last one's first token on. `weights`: bytes that a row reads."""
    llm.use(drafter)
    how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24))  # captures graphs
    engine = llm.engine
    running = started(llm, prompts, how)
    before = _counted(running)
    torch.cuda.synchronize()
    began = time.perf_counter()
    # Until the first answer is complete: then the batch shrinks.
    while not any(s.finished for s in running):
        engine.step()
    seconds = time.perf_counter() - began
    emitted, steps = (now - then for now, then in zip(_counted(running), before, strict=True))
    for sequence in running:
        engine.cancel(sequence)
    step_s = seconds * len(running) / steps
    return Throughput(drafter, len(running), emitted / seconds, emitted / steps, 1000 * step_s, weights / step_s / 1e9)


def _counted(sequences: list[Sequence]) -> tuple[int, int]:
    """Tokens and steps of all sequences so far."""
    return sum(s.stats.emitted for s in sequences), sum(s.stats.steps for s in sequences)
