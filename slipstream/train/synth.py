"""Makes training data: many conversations at once through the engine, in order onto the disk.

Conversations end out of order and are written in order, a shard of them at a time: which of two near-duplicates is
dropped, and all else, is the same whatever ran together and wherever the work was interrupted.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.cache import PAGE_SIZE
from slipstream.llm import LLM
from slipstream.models.config import ModelConfig
from slipstream.models.memory import KV_SHARE, SPARE_PAGES
from slipstream.train.conversation import Ask, Author, Dropped, Made, Task
from slipstream.train.data import ChatWriter
from slipstream.train.loops import Duplicates
from slipstream.types import Output, SamplingParams

if TYPE_CHECKING:
    from slipstream.llm import Prompt

SHARD_ITEMS = 256  # conversations in a shard: what an interrupt may cost
AT_ONCE = {"cuda": 1024, "cpu": 32}  # conversations under way, by kind of device
_LEFT = 0.9  # of the free memory, when the model is loaded
_PROBE = 24  # tokens that each writes to measure the speed


@dataclass(frozen=True)
class Room:
    """What an LLM must be given so that `at_once` conversations run together and none has to make room."""

    at_once: int
    max_model_len: int
    cache_tokens: int


@dataclass(frozen=True)
class Status:
    """How far the work is. `written`: tokens that the target has written since the start, dropped ones included."""

    items: int
    dropped: int
    written: int


def find_room(config: ModelConfig, element_size: int, free: int, longest: int, at_once: int) -> Room:
    """As many as asked for, or as the memory (`free` bytes behind the weights) holds; one at least."""
    each = -(-longest // PAGE_SIZE)
    # Loading leaves a little less than is free now.
    affordable = int(_LEFT * free * KV_SHARE) // (PAGE_SIZE * config.kv_bytes_per_token(element_size))  # pages
    at_once = max(1, min(at_once, (affordable - SPARE_PAGES) // each))
    return Room(at_once, longest, (at_once * each + SPARE_PAGES) * PAGE_SIZE)


def measure_speed(llm: LLM, author: Author, at_once: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens a second that so many conversations are written with, from their first requests."""
    asks = [ask for number in range(at_once) if (ask := next(author.write(number), None)) is not None]
    params = SamplingParams(max_tokens=_PROBE, ignore_eos=True, seed=0)
    requests: list[tuple[Prompt, SamplingParams]] = [(prompt, params) for prompt, _ in asks]
    seconds = 1.0
    for _ in range(2):  # the first round warms up
        began = clock()
        written = sum(len(output.token_ids) for _, output in llm.answers(requests, at_once))
        seconds = clock() - began
    return max(1, written) / max(seconds, 1e-9)


class Synthesis:
    """The work of one command: the conversations that are missing in a data set."""

    def __init__(
        self, llm: LLM, author: Author, writer: ChatWriter, at_once: int, shard_items: int = SHARD_ITEMS
    ) -> None:
        self._llm = llm
        self._author = author
        self._writer = writer
        self._at_once = at_once
        self._shard_items = shard_items
        self._written = 0
        self._known = Duplicates()
        for signature in writer.signatures():
            self._known.add(signature)

    def run(self, count: int, tell: Callable[[Status], None] = lambda status: None) -> None:
        """Write conversations until the data set has dealt with `count` of them; a shard at a time is kept."""
        start = done = self._writer.items
        results: dict[int, Made | Dropped] = {}  # made, and waiting for those before them
        dropped: Counter[str] = Counter()
        for number, result in self._make(range(start, count)):
            results[number] = result
            while done in results:
                reason = self._keep(done, results.pop(done))
                if reason is not None:
                    dropped[reason] += 1
                done += 1
                if (done - start) % self._shard_items == 0 or done == count:
                    self._writer.commit(done - self._writer.items, dropped)
                    dropped.clear()
            lost = sum(self._writer.counts["dropped"].values()) + sum(dropped.values())
            tell(Status(done + len(results), lost, self._written))

    def _keep(self, number: int, result: Made | Dropped) -> str | None:
        """Append a conversation, or say why it is dropped."""
        if isinstance(result, Dropped):
            return result.reason
        if self._known.knows(result.signature):
            return "near-duplicate"
        self._known.add(result.signature)
        self._writer.append(
            result.tokens,
            result.prompt_len,
            temperature=result.temperature,
            item=number,
            source=result.source,
            flags=result.flags,
            signature=result.signature,
        )
        return None

    def _make(self, numbers: Iterable[int]) -> Iterator[tuple[int, Made | Dropped]]:
        """Write these conversations, in whatever order they come to their ends."""
        fresh = iter(numbers)
        ready: deque[tuple[int, Task, Ask]] = deque()  # conversations that go on
        asked: dict[int, tuple[int, Task]] = {}  # place among the requests -> whose it is
        ended: deque[tuple[int, Made | Dropped]] = deque()

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
                self._written += len(output.token_ids)
                number, task = asked.pop(place)
                proceed(number, task, output)
                while ended:
                    yield ended.popleft()
            while ended:
                yield ended.popleft()
            # Those that wanted to go on when the last new one had begun are still to be asked.
            if not ready:
                return
