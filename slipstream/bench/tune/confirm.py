"""Measured speed-up of a drafter: the same prompts, plain and drafted, alternating in one process.

Other programs come and go, and a disturbed step can take many times as long. So the time of a step is the median over
all steps of a drafter, and the drafters alternate at every prompt.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.bench.tune.costs import Clock
from slipstream.llm import LLM
from slipstream.types import SamplingParams

ROUNDS = 2


@dataclass(frozen=True)
class Measured:
    """One drafter against plain decoding, without the time to the first token."""

    speedup: float
    tokens_per_step: float
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens: int
    identical: bool  # to plain decoding, token by token

    @property
    def disturbed(self) -> bool:
        """Whether it is impossible: a step that verifies drafts is not faster than a plain one."""
        return self.speedup > self.tokens_per_step


@dataclass
class _Runs:
    """All answers of one drafter."""

    steps: list[float] = field(default_factory=list)  # seconds of each, without the first step of an answer
    tokens: int = 0  # of those steps
    answers: list[list[int]] = field(default_factory=list)

    def add(self, llm: LLM, prompt: list[int], params: SamplingParams, clock: Clock) -> None:
        choice = llm.generate([prompt], params)[0].outputs[0]
        chunks = choice.metrics.chunks if choice.metrics is not None else ()
        # The engine's own times: a client that has to wait for a busy machine gets several steps as one.
        times = [when if clock is time.perf_counter else clock() for when, _ in chunks]
        self.steps += [later - earlier for earlier, later in itertools.pairwise(times)]
        self.tokens += sum(count for _, count in chunks[1:])
        self.answers.append(choice.token_ids)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / len(self.steps) if self.steps else 1.0

    @property
    def tokens_per_second(self) -> float:
        seconds = statistics.median(self.steps) if self.steps else 0.0
        return self.tokens_per_step / seconds if seconds else 0.0


def confirm(
    llm: LLM,
    prompts: Sequence[list[int]],
    drafters: Sequence[Mapping[str, object]],
    max_tokens: int,
    expired: Callable[[], bool],
    clock: Clock = time.perf_counter,
) -> list[Measured]:
    """Each drafter's speed on the prompts, one answer at a time; the LLM decodes plainly afterwards.

    `expired` is checked between rounds: the machine may be slower now than when the time was planned.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    plain, drafted = _Runs(), [_Runs() for _ in drafters]
    for _ in range(ROUNDS):
        for prompt in prompts:
            for runs, drafter in zip([plain, *drafted], [None, *drafters], strict=True):
                llm.use(drafter)
                runs.add(llm, prompt, params, clock)
        if expired():
            break
    llm.use(None)
    speed = plain.tokens_per_second
    return [
        Measured(
            speedup=runs.tokens_per_second / speed if speed else 0.0,
            tokens_per_step=runs.tokens_per_step,
            tokens_per_second=runs.tokens_per_second,
            plain_tokens_per_second=speed,
            tokens=sum(map(len, runs.answers)),
            identical=runs.answers == plain.answers,
        )
        for runs in drafted
    ]
