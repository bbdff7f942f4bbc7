"""Several writer processes side by side: with a single one a GPU waits for the host most of the time.

Each has the whole model and takes the next number when it has room for a conversation. The results are put in order
here: the data are the same as those of a single process.
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
from slipstream.train.synth.scribe import Scribe, Written


@dataclass(frozen=True)
class WriteJob:
    """What a process needs to write: arguments of an `LLM` and, after its tokenizer, of an `Author`."""

    loading: dict[str, Any]
    author: dict[str, Any]
    at_once: int
    threads: int


class Ready(NamedTuple):
    """Sent by a process that has loaded the model."""

    fingerprint: str
    vocab_size: int
    speed: float  # tokens per second, while the others run


class _Failed(NamedTuple):
    message: str


class Writers:
    """Writer processes; a context manager."""

    def __init__(self, count: int, job: WriteJob) -> None:
        context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork
        self._next: Synchronized[int] = context.Value("q", 0)
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_write, args=(job, self._next, there), name=f"writer {number + 1}", daemon=True
            )
            with _deaf_to_interrupts():
                process.start()
            there.close()  # so that the pipe ends with the process
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
        """Wait until all have loaded the model."""
        return [self._said(pipe) for pipe in self._pipes]

    def write(self, numbers: range) -> Iterator[Written]:
        """Write these conversations, in order of completion."""
        self._next.value = numbers.start
        for pipe in self._pipes:
            pipe.send(numbers.stop)
        busy = set(self._pipes)
        while busy:
            ready_pipes = wait(list(busy))
            for pipe in [pipe for pipe in self._pipes if pipe in ready_pipes]:
                said = self._said(pipe)
                if said is None:  # no numbers left
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
    """Processes started here ignore Ctrl-C: the parent handles it and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _write(job: WriteJob, following: Synchronized[int], pipe: Connection) -> None:
    """The main function of one process; it ends with the pipe."""
    try:
        scribe, ready = _loaded(job)
        pipe.send(ready)
        for written in scribe.write(_numbers(following, pipe.recv())):
            pipe.send(written)
        pipe.send(None)
    except (EOFError, ConnectionError):  # the parent is gone
        return
    except SlipstreamError as error:
        pipe.send(_Failed(str(error)))
    except Exception as error:
        pipe.send(_Failed(f"{type(error).__name__}: {error}"))


def _loaded(job: WriteJob) -> tuple[Scribe, Ready]:
    import torch

    from slipstream.llm import LLM
    from slipstream.train.synth.conversation import Author

    torch.set_num_threads(job.threads)
    llm = LLM(**job.loading)
    assert llm.tokenizer is not None
    scribe = Scribe(llm, Author(llm.tokenizer, **job.author), job.at_once)
    return scribe, Ready(llm.model.fingerprint, llm.model.config.vocab_size, scribe.speed())


def _numbers(following: Synchronized[int], stop: int) -> Iterator[int]:
    """Numbers not taken by another process."""
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= stop:
            return
        yield number
