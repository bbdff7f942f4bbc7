"""Loads a server: closed loop (so many requests under way at all times) or open loop (arrivals at random)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.serve.client import Client, Response
from slipstream.bench.serve.events import Served, read_answer

_SEED = 20
Asked = tuple[BenchPrompt, Response]


@dataclass(frozen=True)
class Load:
    """One point of a measurement."""

    concurrency: int | None = None  # closed loop
    rate: float | None = None  # open loop: requests per second

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"rate {self.rate:g}/s"


@dataclass
class Offered:
    """The result of a load."""

    load: Load
    duration: float = 0.0  # seconds from the first request to the last answer
    cpu: float = 0.0  # seconds that the client computed in that time
    answers: list[Served] = field(default_factory=list)


@dataclass(frozen=True)
class Wire:
    """How prompts become requests."""

    client: Client
    model: str
    tokens: int

    def body(self, prompt: BenchPrompt, answers: Sequence[str] = ()) -> dict[str, Any]:
        """The request body, with the answers to earlier turns."""
        body = {"temperature": 0.0, "max_tokens": self.tokens, **prompt.body()}
        for answer, turn in zip(answers, prompt.turns, strict=False):
            body["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return {**body, "model": self.model, "stream": True, "stream_options": {"include_usage": True}}

    async def ask(self, prompt: BenchPrompt) -> list[Asked]:
        """Send a prompt, and its later turns after each answer."""
        path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        found: list[Asked] = []
        said: list[str] = []
        for turn in range(1 + len(prompt.turns)):
            response = await self.client.post(path, self.body(prompt, said))
            found.append((prompt, response))
            if turn < len(prompt.turns):
                said.append(read_answer(response).text)
        return found


async def offer(
    wire: Wire, prompts: Sequence[BenchPrompt], load: Load, seconds: float, done: Callable[[int], None]
) -> Offered:
    """Send prompts under a load; after `seconds` no more are sent, and the running ones are waited for."""
    found: list[Asked] = []
    began, computed = time.perf_counter(), time.thread_time()
    deadline = began + seconds

    async def ask(prompt: BenchPrompt) -> None:
        found.extend(await wire.ask(prompt))
        done(len(found))

    if load.rate is not None:
        running = []
        for prompt, after in zip(prompts, arrivals(load.rate), strict=False):
            if after >= seconds:
                break
            # Until a time of the clock: of sleeps from one arrival to the next, what each is late would add up.
            await asyncio.sleep(began + after - time.perf_counter())
            running.append(asyncio.create_task(ask(prompt)))
        await asyncio.gather(*running)
    else:
        left = iter(prompts)

        async def worker() -> None:
            for prompt in left:
                await ask(prompt)
                if time.perf_counter() >= deadline:
                    return

        await asyncio.gather(*(worker() for _ in range(load.concurrency or 1)))
    offered = Offered(load, time.perf_counter() - began, time.thread_time() - computed)
    for prompt, response in found:
        served = read_answer(response)
        served.prompt, served.category = prompt.name, prompt.category
        offered.answers.append(served)
    return offered


def arrivals(rate: float) -> Iterator[float]:
    """Seconds from the beginning to each arrival of a Poisson process."""
    rng, when = random.Random(_SEED), 0.0
    while True:
        when += rng.expovariate(rate)
        yield when
