"""The engine loop: one thread owns the engine; clients submit requests from any thread and read an outbox.

Everything that touches the engine runs on that thread: loading, steps, changes of drafters. An interrupt of a client
ends only that client's call. The queues carry plain data, so that the loop could move to another process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from slipstream.engine.core import EngineConfig, EngineCore
from slipstream.errors import EngineClosed
from slipstream.policy import Progress
from slipstream.sequence import Request, Sequence
from slipstream.types import Completion, Delta, Logprobs

log = logging.getLogger("slipstream")
T = TypeVar("T")

_GRACE_S = 5.0  # how long the exit of the process waits for the running step


class Message(NamedTuple):
    """A message to a client about one of its requests."""

    ticket: int
    delta: Delta | None = None  # of a streamed request
    completions: list[Completion] | None = None  # the last message of a finished request
    prompt_logprobs: list[Logprobs | None] | None = None  # with `completions`, if requested
    error: Exception | None = None  # the last message of a failed request


Outbox = SimpleQueue[Message]


@dataclass
class _Entry:
    """A running request."""

    ticket: int
    outbox: Outbox
    sequences: list[Sequence]
    streams: bool


class EngineLoop:
    """Steps an engine while there is work, and sleeps otherwise."""

    def __init__(self) -> None:
        self._core: EngineCore | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._tickets = itertools.count()
        self._entries: dict[int, _Entry] = {}
        self._by_sequence: dict[Sequence, _Entry] = {}
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

    def submit(self, requests: list[Request], outbox: Outbox, *, streams: bool = False) -> list[int]:
        """Queue requests, all of them before the next step; messages arrive in `outbox` under the returned tickets."""
        tickets = [next(self._tickets) for _ in requests]

        def submit() -> None:
            for ticket, request in zip(tickets, requests, strict=True):
                self._open(ticket, request, outbox, streams)

        self._post(submit)
        return tickets

    def cancel(self, ticket: int) -> None:
        """End a request if it is still running, and wait until it is removed."""
        with contextlib.suppress(EngineClosed):  # closing has ended it
            self._wait(lambda: self._cancel(ticket))

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
            except BaseException as error:  # all requests get it, and the next ones are served
                self._fail_all(error)
        try:
            self._run_commands(wait=False)
        finally:
            self._fail_all(EngineClosed("the engine was closed while the request was running"))
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

    def _open(self, ticket: int, request: Request, outbox: Outbox, streams: bool) -> None:
        try:
            sequences = self._loaded.sequences(request)
            self._loaded.engine.scheduler.add(sequences)
        except Exception as error:
            outbox.put(Message(ticket, error=error))
            return
        entry = self._entries[ticket] = _Entry(ticket, outbox, sequences, streams)
        self._by_sequence.update(dict.fromkeys(sequences, entry))

    def _cancel(self, ticket: int) -> None:
        entry = self._entries.pop(ticket, None)
        for sequence in entry.sequences if entry is not None else ():
            self._by_sequence.pop(sequence, None)
            self._loaded.engine.cancel(sequence)

    def _step(self) -> None:
        engine = self._loaded.engine
        for progress in engine.step():
            entry = self._by_sequence.get(progress.sequence)
            if entry is not None and entry.streams and progress.new_tokens:
                entry.outbox.put(Message(entry.ticket, delta=_delta(progress)))
        for sequence in engine.departed():
            self._ended(sequence)

    def _ended(self, sequence: Sequence) -> None:
        """Send the last message of a request, once all its sequences finished or one of them failed."""
        entry = self._by_sequence.get(sequence)
        if entry is None:
            return
        if sequence.error is not None:
            self._cancel(entry.ticket)
            entry.outbox.put(Message(entry.ticket, error=sequence.error))
        elif all(other.finished for other in entry.sequences):
            self._cancel(entry.ticket)
            completions = [other.completion() for other in entry.sequences]
            scored = entry.sequences[0].prompt_logprobs
            entry.outbox.put(Message(entry.ticket, completions=completions, prompt_logprobs=scored))

    def _fail_all(self, error: BaseException) -> None:
        """End all requests: the engine failed in a way that no single request caused."""
        reported = error if isinstance(error, Exception) else EngineClosed(f"the engine was stopped: {error!r}")
        if not isinstance(error, EngineClosed):
            log.error("the engine failed, and all running requests with it: %r", error)
        for entry in list(self._entries.values()):
            try:
                self._cancel(entry.ticket)
            except Exception as second:
                log.error("request %d could not be cancelled: %r", entry.ticket, second)
            entry.outbox.put(Message(entry.ticket, error=reported))


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
    )


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all engines before the interpreter shuts down: no kernel may run then."""
    for loop in list(_loops):
        loop.close()
