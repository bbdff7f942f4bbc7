"""One run, one table: what float32, 8-bit and 4-bit weights cost on this CPU. SmolLM2-135M.

    python -m benchmarks.modes [--modes none int8 int4] [--rounds 15] [--starts 3] [--threads 2] [--json FILE]

Passes over 1 to 64 rows, all modes and sizes in turns, medians; and `slipstream run` in a process of its own: seconds
until its first token and exit, and its peak memory. `import torch` alone is timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.cpu import Passes, alternate
from slipstream import LLM
from slipstream.models.load import weight_bytes

ROWS = (1, 4, 8, 16, 32, 64)
CONTEXT = 200
RUN = ["-m", "slipstream", "run", "Hi", "--max-tokens", "1", "--speculate", "none", "--quantize"]


def measure_passes(modes: list[str], rounds: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass, by mode and rows."""
    passes = {mode: Passes(LLM(speculate=None, quantize=mode).model, CONTEXT + max(ROWS)) for mode in modes}
    actions = {f"{mode} {rows}": passes[mode].over(rows, CONTEXT) for rows in ROWS for mode in modes}
    with torch.inference_mode():
        times = alternate(actions, rounds)
    return {mode: {rows: times[f"{mode} {rows}"] for rows in ROWS} for mode in modes}


def process(arguments: list[str]) -> tuple[float, float]:
    """Seconds and MiB of a Python process."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = LLM(speculate=None, quantize="int8").model.config
    starts: dict[str, list[tuple[float, float]]] = {mode: [] for mode in arguments.modes}
    alone = []
    for _ in range(arguments.starts):
        alone.append(process(["-c", "import torch"])[0])
        for mode, found in starts.items():
            found.append(process([*RUN, mode]))
    figures = {}
    print(f"SmolLM2-135M, {arguments.threads} threads; import torch alone: {statistics.median(alone):.2f} s\n")
    print(
        f"{'':8}{'1 row':>10}"
        + "".join(f"{f'{rows} rows':>9}" for rows in ROWS[1:])
        + "   start   memory   twice + 400"
    )
    for mode, times in measure_passes(arguments.modes, arguments.rounds).items():
        seconds, memory = (statistics.median(each) for each in zip(*starts[mode], strict=True))
        allowed = 2 * weight_bytes(config, torch.float32, mode) / 2**20 + 400
        ratios = {rows: times[rows] / times[1] for rows in ROWS[1:]}
        print(
            f"{mode:8}{times[1]:7.2f} ms"
            + "".join(f"{ratio:9.2f}" for ratio in ratios.values())
            + f"{seconds:6.2f} s{memory:6.0f} MiB{allowed:8.0f} MiB"
        )
        figures[mode] = {"ms": times, "ratio": ratios, "start_s": seconds, "peak_mib": memory, "allowed_mib": allowed}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
