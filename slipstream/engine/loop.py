"""The engine loop: one thread owns the engine; clients submit requests from any thread and read an outbox.

Everything that touches the engine runs on that thread: loading, steps, changes of drafters. An interrupt of a client
ends only that client's call. The queues carry plain data, so that the loop could move to another process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import heapq
import itertools
import logging
import math
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from slipstream.engine.core import EngineConfig, EngineCore
from slipstream.engine.mailbox import Message, Outbox
from slipstream.engine.status import EngineStatus, StatusBoard
from slipstream.errors import DeadlineExceeded, EngineClosed, EngineFailed, QueueFull
from slipstream.policy import Progress
from slipstream.sequence import Request, Sequence
from slipstream.types import Delta

log = logging.getLogger("slipstream")
T = TypeVar("T")

_GRACE_S = 5.0  # how long the exit of the process waits for the running step
_RECENT = 32  # ends of requests that `retry_after` is estimated from
_RETRY_S = (1.0, 60.0)


@dataclass
class _Entry:
    """A request under way."""

    ticket: int
    request: Request
    outbox: Outbox
    streams: bool
    arrived: float
    sequences: list[Sequence]
    spared: bool = False  # it waited while the engine was made anew, and is kept only once

    @property
    def started(self) -> bool:
        """Whether any of its sequences has run."""
        return any(s.table.pages or s.saved is not None or s.output_ids for s in self.sequences)


class EngineLoop:
    """Steps an engine while there is work, and sleeps otherwise.

    If the engine itself fails, the requests that run end with an error, and everything but the weights is made anew.
    """

    def __init__(self) -> None:
        self._core: EngineCore | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._tickets = itertools.count()
        self._under_way: set[int] = set()  # tickets from submission to the last message
        self._entries: dict[int, _Entry] = {}
        self._by_sequence: dict[Sequence, _Entry] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, ticket)
        self._outgoing: defaultdict[Outbox, list[Message]] = defaultdict(list)
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self._board = StatusBoard()
        self._closing = False
        self._gate = threading.RLock()  # nothing is posted after the loop was closed
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()
        _loops.add(self)

    # -- clients, on any thread ---------------------------------------------------------------------------------------

    def load(self, config: EngineConfig) -> EngineCore:
        """Load a model and its drafters. An interrupt of the client stops it."""

        def load() -> EngineCore:
            self._core = EngineCore(config)
            return self._core

        return self.call(load, interruptible=True)

    def submit(
        self, requests: list[Request], outbox: Outbox, *, streams: bool = False, limit: int | None = None
    ) -> list[int]:
        """Queue requests, all of them before the next step; messages arrive in `outbox` under the returned tickets.

        `limit`: QueueFull is raised if more requests than that would be under way.
        """
        arrived = time.perf_counter()
        with self._gate:
            if limit is not None and len(self._under_way) + len(requests) > limit:
                raise QueueFull(f"{len(self._under_way)} requests are under way", retry_after=self.retry_after)
            tickets = [next(self._tickets) for _ in requests]
            self._under_way.update(tickets)

            def submit() -> None:
                for ticket, request in zip(tickets, requests, strict=True):
                    self._open(_Entry(ticket, request, outbox, streams, arrived, []))

            self._post(submit)
        return tickets

    def cancel(self, ticket: int, *, wait: bool = True) -> None:
        """End a request if it is still running, and wait until it is removed."""
        with contextlib.suppress(EngineClosed):  # closing has ended it
            if wait:
                self._wait(lambda: self._cancel(ticket))
            else:
                self._post(lambda: self._cancel(ticket))

    def call(self, action: Callable[[], T], *, interruptible: bool = False) -> T:
        """Run `action` on the engine's thread, between two steps; returns its result or raises its error.

        `interruptible`: an interrupt of the client is passed on to the action, which must clean up after itself.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def act() -> None:
            try:
                results.append(action())
            except BaseException as error:
                errors.append(error)

        if threading.current_thread() is self._thread:
            return action()
        try:
            self._wait(act)
        except KeyboardInterrupt:
            if interruptible:
                self._interrupt()
            raise
        if errors:
            raise errors[0]
        if not results:
            raise EngineClosed("the engine was closed before it could answer")
        return results[0]

    def status(self) -> EngineStatus:
        """The engine's totals and what it holds, between two steps."""
        return self.call(lambda: self._board.status(self._loaded.engine, self._by_sequence))

    @property
    def under_way(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._under_way)

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return not self._closing and self._thread.is_alive()

    @property
    def retry_after(self) -> float:
        """In how many seconds a request will end, by how fast they ended lately."""
        ends = list(self._ends)
        gap = (time.perf_counter() - ends[0]) / len(ends) if ends else 0.0
        return math.ceil(min(max(gap, _RETRY_S[0]), _RETRY_S[1]))

    def close(self) -> None:
        """End all requests and the thread, after the step that runs; a longer step than the grace is not waited for."""
        with self._gate:
            self._closing = True
            self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_GRACE_S)

    def _post(self, command: Callable[[], None]) -> None:
        with self._gate:
            if self._closing:
                raise EngineClosed("the engine is closed", hint="make another LLM")
            self._commands.put(command)

    def _wait(self, command: Callable[[], None]) -> None:
        """Run a command and wait for it; the engine's own thread only queues it (a stream may be collected there)."""
        if threading.current_thread() is self._thread:
            self._commands.put(command)
            return
        done = threading.Event()

        def act() -> None:
            try:
                command()
            finally:
                done.set()

        self._post(act)
        while not done.wait(timeout=1.0):
            if not self._thread.is_alive():
                return

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the engine's thread."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._run_commands()
                if self._entries and not self._closing:
                    self._step()
            except BaseException as error:
                self._recover(error)
            self._flush()
        try:
            self._run_commands(wait=False)
        finally:
            closed = EngineClosed("the engine was closed while the request was running")
            self._fail(list(self._entries.values()), closed)
            self._flush()
            if self._core is not None:
                self._core.close()
        self._core = None

    def _run_commands(self, *, wait: bool = True) -> None:
        """Run the queued commands; without requests, wait for a command if `wait`."""
        if wait and not self._entries:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    @property
    def _loaded(self) -> EngineCore:
        assert self._core is not None, "requests come after loading"
        return self._core

    def _open(self, entry: _Entry) -> None:
        """Make a request's sequences and queue them; an error is the request's own."""
        try:
            if self._core is None:
                raise EngineClosed("the engine failed and could not be made anew")
            entry.sequences = self._loaded.sequences(entry.request)
            self._loaded.engine.scheduler.add(entry.sequences)
        except Exception as error:
            self._send_last(entry, Message(entry.ticket, error=error))
            return
        for sequence in entry.sequences:
            sequence.arrived = entry.arrived
        self._entries[entry.ticket] = entry
        if entry.request.deadline is not None:
            heapq.heappush(self._deadlines, (entry.request.deadline, entry.ticket))
        self._by_sequence.update(dict.fromkeys(entry.sequences, entry))

    def _cancel(self, ticket: int) -> None:
        """Remove a request, if it is still here, and free what it holds."""
        self._under_way.discard(ticket)
        entry = self._entries.pop(ticket, None)
        for sequence in entry.sequences if entry is not None else ():
            self._by_sequence.pop(sequence, None)
            self._board.left(sequence)
            self._loaded.engine.cancel(sequence)

    def _step(self) -> None:
        self._expire()
        engine = self._loaded.engine
        done = engine.step()
        for progress in done:
            entry = self._by_sequence.get(progress.sequence)
            if entry is not None and entry.streams and progress.new_tokens:
                self._outgoing[entry.outbox].append(Message(entry.ticket, delta=_delta(progress)))
        departed = engine.departed()
        self._board.stepped(len(engine.scheduler.running) + len(departed))
        for sequence in departed:
            if engine.failure is None or sequence.error is None:
                self._ended(sequence)
        if engine.failure is not None:
            raise engine.failure

    def _expire(self) -> None:
        """End the requests whose time is over."""
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] < now:
            entry = self._entries.get(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                after = f"it was ended after {now - entry.arrived:.1f} s"
                self._fail([entry], DeadlineExceeded(f"the request was not finished in time: {after}"))

    def _ended(self, sequence: Sequence) -> None:
        """Send the last message of a request, once all its sequences finished or one of them failed."""
        entry = self._by_sequence.get(sequence)
        if entry is None:
            return
        if sequence.error is not None:
            self._fail([entry], sequence.error)
        elif all(other.finished for other in entry.sequences):
            self._cancel(entry.ticket)
            completions = [other.completion() for other in entry.sequences]
            scored = entry.sequences[0].prompt_logprobs
            self._send_last(entry, Message(entry.ticket, completions=completions, prompt_logprobs=scored))

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send_last(self, entry: _Entry, message: Message) -> None:
        self._under_way.discard(entry.ticket)
        self._ends.append(time.perf_counter())
        self._outgoing[entry.outbox].append(message)

    def _flush(self) -> None:
        """Deliver the messages of a step, those of one outbox together. An outbox that fails loses its requests."""
        outgoing, self._outgoing = self._outgoing, defaultdict(list)
        for outbox, messages in outgoing.items():
            try:
                outbox.deliver(messages)
            except Exception as error:
                log.warning("a client cannot be reached any more, and its requests are ended: %r", error)
                for ticket in {message.ticket for message in messages}:
                    self._commands.put(lambda ticket=ticket: self._cancel(ticket))  # type: ignore[misc]

    # -- failures -----------------------------------------------------------------------------------------------------

    def _fail(self, entries: list[_Entry], error: Exception) -> None:
        """End requests with an error."""
        for entry in entries:
            try:
                self._cancel(entry.ticket)
            except Exception as second:
                log.error("request %s could not be removed: %r", entry.request.id, second)
            self._send_last(entry, Message(entry.ticket, error=error))

    def _recover(self, error: BaseException) -> None:
        """The engine failed in a way that no single request caused: make it anew. Requests that wait are kept, once."""
        if self._core is None:
            log.error("the engine failed before it was loaded: %r", error)
            return
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        log.error("the engine failed and is made anew: %s", cause, exc_info=error)
        error.__traceback__ = None  # its frames hold the old cache
        hint = "the engine was made anew; send the request again"
        kept = [entry for entry in self._entries.values() if not (entry.started or entry.spared)]
        ended = [entry for entry in self._entries.values() if entry.started or entry.spared]
        self._board.restarted(self._core.engine)
        self._fail(ended, EngineFailed(f"the engine failed while the request was running: {cause}", hint=hint))
        self._entries.clear()
        self._by_sequence.clear()
        try:
            self._core.renew()
        except BaseException as second:
            log.critical("the engine could not be made anew: %r", second)
            self._core = None
            self._fail(kept, EngineFailed(f"the engine failed and could not be made anew: {second}"))
            self._closing = True
            return
        for entry in kept:
            entry.spared = True
            self._open(entry)


def _delta(progress: Progress) -> Delta:
    sequence, count = progress.sequence, progress.new_tokens
    text = sequence.text[sequence.text_shown :]
    sequence.text_shown = len(sequence.text)
    return Delta(
        index=sequence.choice,
        text=text,
        token_ids=sequence.output_ids[-count:],
        origins=sequence.stats.origins[-count:],
        finish_reason=sequence.finish_reason,
        completion=sequence.completion() if sequence.finished else None,
        trees=progress.trees,
        decisions=[progress.decision] * len(progress.trees),  # the policy decides on the host, a step at a time
        logprobs=sequence.logprobs[-count:] if sequence.params.logprobs is not None else None,
    )


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all engines before the interpreter shuts down: no kernel may run then."""
    for loop in list(_loops):
        loop.close()
