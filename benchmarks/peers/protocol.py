"""The protocol between benchmark and peers: one JSON object on stdin, one on stdout.

This file runs inside the environment of every peer, so it needs only the standard library.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """The same model in the formats that peers read, and a folder for more of them."""

    gguf: str
    directory: str  # of Hugging Face, float32
    draft: str  # the same with some of the layers
    scratch: str


@dataclass(frozen=True)
class Task:
    """What to answer, how often, and on which cores."""

    modes: list[str]  # modes, by the peer's names
    prompts: dict[str, list[int]]  # kind of prompt -> token ids: tokenizers are not measured
    stop_ids: list[int]
    max_tokens: int
    context: int  # longest sequence, prompt included
    rounds: int
    cores: list[int]
    paths: Paths
    began: float = 0.0  # when the process was started, wall clock

    @property
    def threads(self) -> int:
        """The number of threads: one for each core."""
        return len(self.cores)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"paths": Paths(**fields["paths"])})


@dataclass(frozen=True)
class Run:
    """One answer."""

    mode: str
    kind: str
    first_s: float  # until the first tokens
    first_tokens: int  # how many came with them: a draft may be verified together with the prompt
    decode_s: float  # from then to the end
    tokens: list[int]


@dataclass(frozen=True)
class Report:
    """The results of a process."""

    version: str
    startup_s: float  # from the start of the process to the first token of its first answer
    peak_mib: float  # peak resident memory of the process and its children
    runs: list[Run]

    @classmethod
    def from_json(cls, text: str) -> Report:
        """From the output of `serve`."""
        fields = json.loads(text)
        return cls(**fields | {"runs": [Run(**run) for run in fields["runs"]]})


First = Callable[[int], None]  # called with the number of tokens so far; only the first call counts


class Speaker(ABC):
    """A loaded model that decodes greedily in one way."""

    def prepare(self) -> None:
        """Called before every answer, not timed: forget earlier answers."""
        return

    @abstractmethod
    def answer(self, ids: list[int], first: First) -> list[int]:
        """The tokens that follow a prompt."""


def serve(open_mode: Callable[[str, Task], Speaker], version: str) -> None:
    """The main function of a peer: read the task, load, answer, report."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print; stdout is ours
    task = Task.from_json(sys.stdin.read())
    speakers = {mode: open_mode(mode, task) for mode in task.modes}
    runs, startup = [], 0.0
    for _ in range(task.rounds):
        for kind, ids in task.prompts.items():
            for mode, speaker in speakers.items():
                runs.append(_timed(speaker, mode, kind, ids))
                startup = startup or time.time() - runs[0].decode_s - task.began
    json.dump(asdict(Report(version, startup, peak_mib(), runs)), out)
    out.flush()


def _timed(speaker: Speaker, mode: str, kind: str, ids: list[int]) -> Run:
    stamps: list[tuple[float, int]] = []

    def first(count: int) -> None:
        if not stamps:
            stamps.append((time.perf_counter(), count))

    speaker.prepare()
    began = time.perf_counter()
    tokens = speaker.answer(ids, first)
    ended = time.perf_counter()
    ((there, count),) = stamps
    return Run(mode, kind, there - began, count, ended - there, tokens)


def peak_mib() -> float:
    """The peak memory of this process and its living children. Exact on Linux; elsewhere children are not counted."""
    if not Path("/proc/self/status").exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    status = {int(path.parent.name): _status(path) for path in Path("/proc").glob("[0-9]*/status")}
    family = {os.getpid()}
    while grown := {pid for pid, fields in status.items() if int(fields.get("PPid", 0)) in family} - family:
        family |= grown
    return sum(int(status[pid].get("VmHWM", "0").split()[0]) for pid in family) / 1024


def _status(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:  # it has ended meanwhile
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
