"""What a round costs, drafting and the rest of it apart, at one length of context and one size of batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import device_ms
from slipstream import LLM, SamplingParams
from slipstream.engine.burst import Burst
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


@dataclass(frozen=True)
class Standing:
    """The halves of a round that can be run over and over."""

    burst: Burst
    nodes: int
    before: int  # bytes reserved on the device when the drafter was there, and no round had run
    draft: Callable[[], None] | None
    verify: Callable[[], None]
    back: Callable[[], None]  # to where the rounds begin, so that nothing runs past the pages


@contextmanager
def standing(llm: LLM, drafter: str, context: int, batch: int = 1) -> Iterator[Standing]:
    """Rounds behind so many tokens of context.

    The text is random: costs do not depend on it.
    """
    llm.use(drafter)
    burst = llm.engine.burst
    assert burst is not None, f"{drafter} does not draft on the device"
    chance, vocab = random.Random(0), 40_000
    prompts = [[chance.randrange(1000, vocab) for _ in range(context)] for _ in range(batch)]
    before = torch.cuda.memory_reserved()
    burst.go_ahead = lambda launched: None  # type: ignore[method-assign]  # the host is to know where lanes stand
    # The first answers of a large batch go on while the last prompts are read, and must not end meanwhile.
    length = 400 + 20 * batch
    sequences = started(llm, prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length))
    for _ in range(2):  # the second round of a size is the one that is recorded
        llm.engine.step()
    with torch.inference_mode():
        burst.reserve(sequences)
        size = burst.filled(sequences)
        start = size.lanes.slots.clone()

        def back() -> None:
            size.lanes.slots.copy_(start)
            size.number.zero_()

        draft = None if size.loop is None else lambda: burst.draft(size, False)
        try:
            yield Standing(burst, size.lanes.nodes, before, draft, lambda: burst.verify(size, False), back)
        finally:
            for sequence in sequences:
                llm.engine.cancel(sequence)


def step(llm: LLM, drafter: str, context: int, batch: int = 1) -> Step:
    """Rounds behind so many tokens of context."""
    with standing(llm, drafter, context, batch) as here:
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
    gb_per_s: float  # of the target's weights, of which a step reads once what a lone row does


def throughput(llm: LLM, drafter: str, prompts: list[list[int]], tokens: int, weights: int) -> Throughput:
    """Answers to all prompts at once, from the first token of the last of them on. `weights`: bytes a row reads."""
    llm.use(drafter)
    how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24))  # graphs are made
    engine = llm.engine
    running = started(llm, prompts, how)
    before = _counted(running)
    torch.cuda.synchronize()
    began = time.perf_counter()
    # Until the first answer is complete: from then on the batch is another.
    while not any(s.finished for s in running):
        engine.step()
    seconds = time.perf_counter() - began
    emitted, steps = (now - then for now, then in zip(_counted(running), before, strict=True))
    for sequence in running:
        engine.cancel(sequence)
    step_s = seconds * len(running) / steps
    return Throughput(drafter, len(running), emitted / seconds, emitted / steps, 1000 * step_s, weights / step_s / 1e9)


def _counted(sequences: list[Sequence]) -> tuple[int, int]:
    """Tokens and steps of all of them so far."""
    return sum(s.stats.emitted for s in sequences), sum(s.stats.steps for s in sequences)
