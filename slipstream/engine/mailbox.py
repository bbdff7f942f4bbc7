"""Messages from the engine to its clients. What a client has not read yet is kept as one delta per choice.

A reader that falls behind delays no other: the engine never waits for it, and what is kept for it is bounded by its own
answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from slipstream.types import Completion, Delta, Logprobs


class Message(NamedTuple):
    """A message to a client about one of its requests."""

    ticket: int
    delta: Delta | None = None  # of a streamed request
    completions: list[Completion] | None = None  # the last message of a finished request
    prompt_logprobs: list[Logprobs | None] | None = None  # with `completions`, if requested
    error: Exception | None = None  # the last message of a failed request

    @property
    def key(self) -> tuple[int, int]:
        """What the message is about: a choice of a request, or (-1) the end of the request."""
        return self.ticket, -1 if self.delta is None else self.delta.index


class Outbox(Protocol):
    """Where the engine leaves messages. `deliver` is called by its thread after each step, and must not wait."""

    def deliver(self, messages: list[Message]) -> None:
        """Take the messages of one step."""


class Unread:
    """Messages that were not read yet, in order; deltas of one choice are joined."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Message] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, message: Message) -> bool:
        """Keep a message; False if it was joined to one that waits."""
        key, delta = message.key, message.delta
        before = self._kept.get(key)
        if before is None or before.delta is None or delta is None:
            self._kept[key] = message
            return True
        self._kept[key] = message._replace(delta=before.delta.then(delta))
        return False

    def pop(self, key: tuple[int, int]) -> Message:
        """Take one message out."""
        return self._kept.pop(key)

    def take(self) -> Iterable[Message]:
        """Take all messages out."""
        kept, self._kept = self._kept, {}
        return kept.values()


class Mailbox:
    """An outbox whose reader waits in a thread of its own."""

    def __init__(self) -> None:
        self._keys: SimpleQueue[tuple[int, int]] = SimpleQueue()  # each once, while its message waits
        self._unread = Unread()
        self._lock = threading.RLock()  # reentrant: a stream may be collected, and so cancelled, anywhere

    def deliver(self, messages: list[Message]) -> None:
        """Take the messages of one step."""
        for message in messages:
            with self._lock:
                fresh = self._unread.add(message)
            if fresh:
                self._keys.put(message.key)

    def get(self) -> Message:
        """The oldest message; waits for one."""
        key = self._keys.get()
        with self._lock:
            return self._unread.pop(key)
