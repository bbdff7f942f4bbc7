"""Runs many conversations at once through one engine, each made from its number."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from slipstream.llm import LLM
from slipstream.train.synth.conversation import Ask, Author, Dropped, Made, Task
from slipstream.types import Output, SamplingParams

if TYPE_CHECKING:
    from slipstream.inputs import Prompt

_PROBE = 24  # tokens per conversation for measuring the speed


class Written(NamedTuple):
    """A finished conversation, kept or dropped."""

    number: int
    result: Made | Dropped
    tokens: int  # written by the target since the previous one


class Scribe:
    """Runs an author's conversations, `at_once` at a time."""

    def __init__(self, llm: LLM, author: Author, at_once: int) -> None:
        self._llm = llm
        self._author = author
        self._at_once = at_once

    def speed(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Tokens per second of that many conversations, measured on their first requests."""
        author, at_once = self._author, self._at_once
        asks = [ask for number in range(at_once) if (ask := next(author.write(number), None)) is not None]
        params = SamplingParams(max_tokens=_PROBE, ignore_eos=True, seed=0)
        requests: list[tuple[Prompt, SamplingParams]] = [(prompt, params) for prompt, _ in asks]
        seconds = 1.0
        for _ in range(2):  # the first round is the warm-up
            began = clock()
            written = sum(len(output.token_ids) for _, output in self._llm.answers(requests, at_once))
            seconds = clock() - began
        return max(1, written) / max(seconds, 1e-9)

    def write(self, numbers: Iterable[int]) -> Iterator[Written]:
        """Write these conversations, in order of completion."""
        fresh = iter(numbers)
        ready: deque[tuple[int, Task, Ask]] = deque()  # conversations with a next request
        pending: dict[int, tuple[int, Task]] = {}  # index of a request -> its conversation
        ended: deque[tuple[int, Made | Dropped]] = deque()
        tokens = 0

        def proceed(number: int, task: Task, output: Output | None) -> None:
            try:
                ready.append((number, task, task.send(output)))  # type: ignore[arg-type]  # None: a generator's start
            except StopIteration as stop:
                ended.append((number, stop.value))

        def requests() -> Iterator[tuple[Prompt, SamplingParams]]:
            """Started conversations come first, so that they end as soon as they can."""
            for place in itertools.count():
                while not ready:
                    number = next(fresh, None)
                    if number is None:
                        return
                    proceed(number, self._author.write(number), None)
                number, task, ask = ready.popleft()
                pending[place] = number, task
                yield ask

        while True:
            for place, output in self._llm.answers(requests(), self._at_once):
                tokens += len(output.token_ids)
                number, task = pending.pop(place)
                proceed(number, task, output)
                while ended:
                    yield Written(*ended.popleft(), tokens)
                    tokens = 0
            while ended:
                yield Written(*ended.popleft(), tokens)
                tokens = 0
            # Conversations that became ready after the last new one started still have requests.
            if not ready:
                return
