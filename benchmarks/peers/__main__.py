"""Other engines and ours: the same model, the same prompts, the same cores. SmolLM2-135M.

    python -m benchmarks.peers [--only ours llama.cpp] [--ours suffix eagle3] [--threads 2] [--tokens 128] [--rounds 3]
                               [--quick] [--work DIR] [--json FILE]

Each peer is installed into its own environment (gigabytes, kept under --work and reused) and runs as its own process.
First each mode runs alone, for its memory and its time to the first token from a cold start; then all modes of a peer
answer every prompt in turns, in one process, and the best of the rounds counts. What cannot be installed or crashes is
a row with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.peers import figures
from benchmarks.peers.bench import Bench
from benchmarks.peers.environments import run
from benchmarks.peers.protocol import Paths, Task
from benchmarks.peers.table import PEERS, ours
from slipstream.folders import cache_directory
from slipstream.native.machine import cpu_model

_CONTEXT = 2048  # tokens: enough for every prompt and answer


def prepare(work: Path, cores: list[int], tokens: int, rounds: int, timeout: float) -> Task:
    """The task without its modes; writes the model to disk if needed."""
    command = [sys.executable, "-m", "benchmarks.peers.prepare", str(work / "models")]
    fields = json.loads(run(command, work / "logs" / "prepare.log", timeout))
    fields["paths"] = Paths(**fields["paths"])
    return Task(modes=[], max_tokens=tokens, context=_CONTEXT, rounds=rounds, cores=cores, **fields)


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def arguments_of(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ENGINE", help=", ".join(names))
    parser.add_argument("--ours", nargs="*", default=["suffix"], metavar="DRAFTER", help="what drafts for us")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="24 tokens, 2 rounds")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one installation or process")
    parser.add_argument("--work", type=Path, default=cache_directory() / "peers", help="environments, models and logs")
    parser.add_argument("--json", type=Path, help="the file of the figures; peers.json under --work by default")
    arguments = parser.parse_args()
    if not 1 <= arguments.threads <= len(usable_cores()):
        parser.error(f"--threads {arguments.threads}: valid: 1 to {len(usable_cores())}")
    if arguments.quick:
        arguments.tokens, arguments.rounds = 24, 2
    return arguments


def main() -> None:
    names = ["ours", *PEERS]
    arguments = arguments_of(names)
    cores = usable_cores()[: arguments.threads]
    work = arguments.work.absolute()
    task = prepare(work, cores, arguments.tokens, arguments.rounds, arguments.timeout)
    bench = Bench(work, task, arguments.timeout)
    peers = {"ours": ours(arguments.ours), **PEERS}
    rows = [row for name in names if name in arguments.only for row in bench.measure(name, peers[name])]
    title = f"SmolLM2-135M, {arguments.threads} threads, {arguments.tokens} tokens, best of {arguments.rounds} rounds"
    print(f"{title}; {cpu_model()}\n")
    figures.show(rows)
    settings = {name: getattr(arguments, name) for name in ("threads", "tokens", "rounds")}
    report = {"machine": cpu_model(), **settings, "rows": [row.as_dict() for row in rows]}
    file = arguments.json or work / "peers.json"
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\nall figures: {file}")


if __name__ == "__main__":
    main()
