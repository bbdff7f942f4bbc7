"""Many conversations under way at once through one engine, each made from its number."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from slipstream.llm import LLM
from slipstream.train.conversation import Ask, Author, Dropped, Made, Task
from slipstream.types import Output, SamplingParams

if TYPE_CHECKING:
    from slipstream.llm import Prompt

_PROBE = 24  # tokens that each conversation has to measure the speed


class Written(NamedTuple):
    """A conversation that came to its end, or to nothing."""

    number: int
    result: Made | Dropped
    tokens: int  # that the target has written since the one before it


class Scribe:
    """Writes what an author asks for, `at_once` conversations together."""

    def __init__(self, llm: LLM, author: Author, at_once: int) -> None:
        self._llm = llm
        self._author = author
        self._at_once = at_once

    def speed(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Tokens a second that so many conversations are written with, from their first requests."""
        author, at_once = self._author, self._at_once
        asks = [ask for number in range(at_once) if (ask := next(author.write(number), None)) is not None]
        params = SamplingParams(max_tokens=_PROBE, ignore_eos=True, seed=0)
        requests: list[tuple[Prompt, SamplingParams]] = [(prompt, params) for prompt, _ in asks]
        seconds = 1.0
        for _ in range(2):  # the first round warms up
            began = clock()
            written = sum(len(output.token_ids) for _, output in self._llm.answers(requests, at_once))
            seconds = clock() - began
        return max(1, written) / max(seconds, 1e-9)

    def write(self, numbers: Iterable[int]) -> Iterator[Written]:
        """Write these conversations, in whatever order they come to their ends."""
        fresh = iter(numbers)
        ready: deque[tuple[int, Task, Ask]] = deque()  # conversations that go on
        asked: dict[int, tuple[int, Task]] = {}  # place among the requests -> whose it is
        ended: deque[tuple[int, Made | Dropped]] = deque()
        tokens = 0

        def proceed(number: int, task: Task, output: Output | None) -> None:
            try:
                ready.append((number, task, task.send(output)))  # type: ignore[arg-type]  # None: a generator's start
            except StopIteration as stop:
                ended.append((number, stop.value))

        def requests() -> Iterator[tuple[Prompt, SamplingParams]]:
            """Whoever goes on comes first, so that conversations end as soon as they can."""
            for place in itertools.count():
                while not ready:
                    number = next(fresh, None)
                    if number is None:
                        return
                    proceed(number, self._author.write(number), None)
                number, task, ask = ready.popleft()
                asked[place] = number, task
                yield ask

        while True:
            for place, output in self._llm.answers(requests(), self._at_once):
                tokens += len(output.token_ids)
                number, task = asked.pop(place)
                proceed(number, task, output)
                while ended:
                    yield Written(*ended.popleft(), tokens)
                    tokens = 0
            while ended:
                yield Written(*ended.popleft(), tokens)
                tokens = 0
            # Those that wanted to go on when the last new one had begun are still to be asked.
            if not ready:
                return
