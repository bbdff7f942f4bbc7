"""All rows of one peer: its environment, each mode alone, then all of them in turns."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers import figures
from benchmarks.peers.environments import Skipped, environment, run
from benchmarks.peers.figures import Row
from benchmarks.peers.protocol import Report, Task
from benchmarks.peers.table import Peer


@dataclass(frozen=True)
class Bench:
    """The settings of all peers."""

    work: Path
    task: Task
    timeout: float

    def measure(self, name: str, peer: Peer) -> list[Row]:
        """All rows of a peer."""
        say(f"{name}: environment")
        try:
            python = environment(name, peer, self.work, self.timeout)
        except Skipped as reason:
            return [Row(name, mode, skipped=f"cannot be installed: {reason}") for mode in peer.modes]
        alone, rows = dict[str, Report](), list[Row]()
        for mode in peer.modes:
            say(f"{name}: {mode}, alone")
            try:
                alone[mode] = self._alone(name, peer, python, mode)
            except Skipped as reason:
                rows.append(Row(name, mode, skipped=str(reason)))
        if not alone:
            return rows
        say(f"{name}: {', '.join(alone)}, in turns")
        try:
            runs = self._ask(name, peer, python, replace(self.task, modes=list(alone))).runs
        except Skipped as reason:
            return rows + [Row(name, mode, skipped=f"in turns with the others: {reason}") for mode in alone]
        for mode, report in alone.items():
            plain = peer.modes[mode]
            rows.append(figures.row(name, mode, report, runs, plain if plain in alone else None))
        return rows

    def _alone(self, name: str, peer: Peer, python: str, mode: str) -> Report:
        """The longest prompt, once, in a fresh process."""
        longest = max(self.task.prompts, key=lambda kind: len(self.task.prompts[kind]))
        prompts = {longest: self.task.prompts[longest]}
        task = replace(self.task, modes=[mode], prompts=prompts, rounds=1)
        if peer.build is not None:
            run([python, "-m", peer.build], self._log(name, "build"), self.timeout, task.to_json())
        return self._ask(name, peer, python, task)

    def _ask(self, name: str, peer: Peer, python: str, task: Task) -> Report:
        task = replace(task, began=time.time())
        log = self._log(name, "-".join(task.modes) if len(task.modes) == 1 else "in turns")
        command, given = [python, "-m", peer.module], task.to_json()
        answer = run(command, log, self.timeout, given, task.cores, peer.preload)
        try:
            return Report.from_json(answer)
        except (ValueError, TypeError, KeyError):
            raise Skipped(f"reported nonsense: {answer[:80]!r}") from None

    def _log(self, name: str, what: str) -> Path:
        return self.work / "logs" / f"{name}-{what.replace(' ', '-').replace('/', '-')}.log"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
