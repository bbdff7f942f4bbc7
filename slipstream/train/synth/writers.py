"""Several processes that write side by side: a GPU waits for the host of a single one most of the time.

Each has the whole model and takes the next number when it has room for a conversation. What they make comes here, where
it is put in order: the data are those of a single process, whoever made what.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple

from slipstream.errors import SlipstreamError, WriterFailed
from slipstream.train.scribe import Scribe, Written


@dataclass(frozen=True)
class Order:
    """All that a process must know to write: arguments of an `LLM` and, behind its tokenizer, of an `Author`."""

    loading: dict[str, Any]
    author: dict[str, Any]
    at_once: int
    threads: int


class Ready(NamedTuple):
    """What a process says when it has loaded the model."""

    fingerprint: str
    vocab_size: int
    speed: float  # tokens a second, beside the others


class _Failed(NamedTuple):
    message: str


class Writers:
    """Processes that write, from `with` on until its end."""

    def __init__(self, count: int, order: Order) -> None:
        context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
        self._next: Synchronized[int] = context.Value("q", 0)
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_write, args=(order, self._next, there), name=f"writer {number + 1}", daemon=True
            )
            with _deaf_to_interrupts():
                process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.terminate()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def ready(self) -> list[Ready]:
        """Wait until all of them have loaded the model."""
        return [self._said(pipe) for pipe in self._pipes]

    def write(self, numbers: range) -> Iterator[Written]:
        """Write these conversations, in whatever order they come to their ends."""
        self._next.value = numbers.start
        for pipe in self._pipes:
            pipe.send(numbers.stop)
        busy = set(self._pipes)
        while busy:
            heard = wait(list(busy))
            for pipe in [pipe for pipe in self._pipes if pipe in heard]:
                said = self._said(pipe)
                if said is None:  # it found no number any more
                    busy.remove(pipe)
                else:
                    yield said

    def _said(self, pipe: Connection) -> Any:
        process = self._processes[self._pipes.index(pipe)]
        try:
            said = pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise WriterFailed(f"{process.name} ended with exit code {process.exitcode}") from None
        if isinstance(said, _Failed):
            raise WriterFailed(f"{process.name}: {said.message}")
        return said


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started meanwhile never hears Ctrl-C: whoever started it does, and ends it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _write(order: Order, following: Synchronized[int], pipe: Connection) -> None:
    """The work of one process; the end of the pipe is its end, too."""
    try:
        scribe, ready = _loaded(order)
        pipe.send(ready)
        for written in scribe.write(_numbers(following, pipe.recv())):
            pipe.send(written)
        pipe.send(None)
    except (EOFError, ConnectionError):  # nobody is there any more
        return
    except SlipstreamError as error:
        pipe.send(_Failed(str(error)))
    except Exception as error:
        pipe.send(_Failed(f"{type(error).__name__}: {error}"))


def _loaded(order: Order) -> tuple[Scribe, Ready]:
    import torch

    from slipstream.llm import LLM
    from slipstream.train.conversation import Author

    torch.set_num_threads(order.threads)
    llm = LLM(**order.loading)
    assert llm.tokenizer is not None
    scribe = Scribe(llm, Author(llm.tokenizer, **order.author), order.at_once)
    return scribe, Ready(llm.model.fingerprint, llm.model.config.vocab_size, scribe.speed())


def _numbers(following: Synchronized[int], stop: int) -> Iterator[int]:
    """Numbers that no other process has taken."""
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= stop:
            return
        yield number
