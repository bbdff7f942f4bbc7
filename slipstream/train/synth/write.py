"""Makes training data: many conversations at once through the engine, written to disk in order.

Conversations end out of order and are written in order, a shard at a time. So the data, including which near-duplicate
is dropped, do not depend on batching or interruptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipstream.cache import PAGE_SIZE
from slipstream.models.config import ModelConfig
from slipstream.models.memory import KV_SHARE, SPARE_PAGES
from slipstream.train.data import ChatWriter
from slipstream.train.synth.conversation import Dropped, Made
from slipstream.train.synth.loops import Duplicates
from slipstream.train.synth.scribe import Written

Write = Callable[[range], Iterator[Written]]

SHARD_ITEMS = 256  # conversations per shard: the most that an interrupt loses
AT_ONCE = {"cuda": 1024, "cpu": 32}  # concurrent conversations, by device
_LEFT = 0.9  # of the free memory, when the model is loaded


@dataclass(frozen=True)
class Room:
    """The cache and batch size with which `at_once` conversations run without preemption."""

    at_once: int
    max_model_len: int
    cache_tokens: int


@dataclass(frozen=True)
class Status:
    """Progress. `written`: tokens that the target has written since the start, dropped ones included."""

    items: int
    dropped: int
    written: int


def find_room(config: ModelConfig, element_size: int, free: int, longest: int, at_once: int) -> Room:
    """As many as requested, or as fit into the memory (`free` bytes after the weights); at least one."""
    each = -(-longest // PAGE_SIZE)
    # After loading, a little less is free than now.
    affordable = int(_LEFT * free * KV_SHARE) // (PAGE_SIZE * config.kv_bytes_per_token(element_size))  # pages
    at_once = max(1, min(at_once, (affordable - SPARE_PAGES) // each))
    return Room(at_once, longest, (at_once * each + SPARE_PAGES) * PAGE_SIZE)


class Synthesis:
    """The work of one command: the missing conversations of a data set."""

    def __init__(self, writer: ChatWriter, write: Write, shard_items: int = SHARD_ITEMS) -> None:
        """`write` makes conversations from numbers, in order of completion."""
        self._writer = writer
        self._write = write
        self._shard_items = shard_items
        self._known = Duplicates()
        for signature in writer.signatures():
            self._known.add(signature)

    def run(self, count: int, tell: Callable[[Status], None] = lambda status: None) -> None:
        """Write conversations until `count` are processed; saves one shard at a time."""
        start = done = self._writer.items
        results: dict[int, Made | Dropped] = {}  # complete, waiting for earlier ones
        dropped: Counter[str] = Counter()
        written = 0
        for number, result, tokens in self._write(range(start, count)):
            results[number] = result
            written += tokens
            while done in results:
                reason = self._keep(done, results.pop(done))
                if reason is not None:
                    dropped[reason] += 1
                done += 1
                if (done - start) % self._shard_items == 0 or done == count:
                    self._writer.commit(done - self._writer.items, dropped)
                    dropped.clear()
            lost = sum(self._writer.counts["dropped"].values()) + sum(dropped.values())
            tell(Status(done + len(results), lost, written))

    def _keep(self, number: int, result: Made | Dropped) -> str | None:
        """Append a conversation, or return why it is dropped."""
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
