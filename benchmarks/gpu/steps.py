"""What a round costs, drafting and the rest of it apart, at one length of context and one size of batch."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import device_ms
from slipstream import LLM, SamplingParams
from slipstream.sequence import Sequence

_ROUNDS = 16  # timed


def started(llm: LLM, prompts: list[list[int]], how: SamplingParams) -> list[Sequence]:
    """Sequences that have all had their first token."""
    sequences = [sequence for prompt in prompts for sequence in llm._sequences(llm._request(prompt, how))]
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
    verify_ms: float  # the target's pass, the choice, the way to the next root
    capture_ms: float  # spent once, on all graphs of this engine
    graph_mib: float  # memory that making them took


def step(llm: LLM, drafter: str, context: int, batch: int = 1) -> Step:
    """Rounds behind so many tokens of context. The text is random: costs do not depend on it."""
    llm.use(drafter)
    burst = llm.engine.burst
    assert burst is not None, f"{drafter} does not draft on the device"
    chance, vocab = random.Random(0), 40_000
    prompts = [[chance.randrange(1000, vocab) for _ in range(context)] for _ in range(batch)]
    how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
    engine, before = llm.engine, torch.cuda.memory_reserved()
    sequences = started(llm, prompts, how)
    for _ in range(2):  # the second round of a size is the one that is recorded
        engine.step()
    with torch.inference_mode():
        burst.reserve(sequences)
        size = burst.filled(sequences)
        start = size.lanes.slots.clone()
        draft_ms = device_ms(lambda: burst.draft(size, False), _ROUNDS) if size.loop is not None else 0.0

        def verify() -> None:
            # Every round from the same place, so that nothing runs past the pages.
            size.lanes.slots.copy_(start)
            size.number.zero_()
            burst.verify(size, False)

        verify_ms = device_ms(verify, _ROUNDS)
    for sequence in sequences:
        engine.cancel(sequence)
    graph_mib = (torch.cuda.memory_reserved() - before) / 2**20
    return Step(
        drafter, batch, context, size.lanes.nodes, draft_ms, verify_ms, burst.graphs.capture_ms, max(0.0, graph_mib)
    )


@dataclass(frozen=True)
class Throughput:
    """All answers of a batch together."""

    drafter: str
    batch: int
    tok_s: float
    tokens_per_step: float


def throughput(llm: LLM, drafter: str, prompts: list[list[int]], tokens: int) -> Throughput:
    """Answers to all prompts at once, from the first token of the last of them on."""
    llm.use(drafter)
    how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24))  # graphs are made
    engine = llm.engine
    running = started(llm, prompts, how)
    before = sum(s.stats.emitted for s in running)
    torch.cuda.synchronize()
    began = time.perf_counter()
    # Until the first answer is complete: from then on the batch is another.
    while not any(s.finished for s in running):
        engine.step()
    seconds = time.perf_counter() - began
    emitted = sum(s.stats.emitted for s in running) - before
    steps = sum(s.stats.steps for s in running)
    for sequence in running:
        engine.cancel(sequence)
    return Throughput(drafter, len(prompts), emitted / seconds, sum(s.stats.emitted for s in running) / steps)
