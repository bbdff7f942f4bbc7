"""Is `auto` ever slower than plain decoding? A cell for each kind of prompt, temperature, batch and weights' format.

    python -m benchmarks.never_slower FILE [--quantize none int8 int4] [--batch 1 8] [--temperature 0 1] [--rounds 2]
                                      [--speculate auto suffix ...] [--kinds code chat ...] [--each 16] [--tokens 128]
                                      [--threads 2] [--minutes 20]
    SLIPSTREAM_NATIVE=0 python -m benchmarks.never_slower FILE --quantize none --batch 1 --speculate auto
    python -m benchmarks.never_slower FILE --show

Each prompt of the shipped workload is answered with every setting, one right after the other; at a batch of 8 the
prompts of a kind are a closed loop, eight at a time. Fixed settings and 4-bit weights are measured at batch 1 alone.
Without kernels of our own (the second command) rows have a name of their own, `none (library)`, in the same file.

What was measured is appended to FILE, and a run that was stopped, by `--minutes` too, goes on where it was: every cell
of the command has its first round before any has its second. What the policy learns is kept in FILE.policy, which
starts with what ships, and is not the user's. Speed-ups are from arrival to last token; `cell_figures.py` says what
the two intervals are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from benchmarks.cell_tables import show
from benchmarks.cells import LIBRARY, Cell, Measurement, append, beside, keep_policy_in, learns, load
from slipstream import LLM
from slipstream.bench.prompts import BenchPrompt, workload
from slipstream.native.machine import machine

KINDS = ["code", "structured", "edit", "chat", "story", "reasoning"]
_ALONE = {"int4"}  # formats that are measured at batch 1 only

Work = tuple[Cell, list[BenchPrompt], list[str]]


def work(given: argparse.Namespace, weights: str, done: set[object], round_: int) -> Iterator[Work]:
    """What is left of a round: a cell, what is asked together, and the settings that have not answered it."""
    prompts = {kind: [p for p in workload() if p.category == kind][: given.each] for kind in given.kinds}
    for batch in given.batch:
        size = 1 if batch == 1 else given.each  # of what is asked together
        starts = range(0, given.each, size)
        for start, temperature, (kind, listed) in product(starts, given.temperature, prompts.items()):
            group = listed[start : start + size]
            cell = Cell(weights, batch, temperature, kind)
            settings = [
                setting
                for setting in given.speculate
                if batch == 1 or learns(setting)
                if any((cell, prompt.name, round_, setting) not in done for prompt in group)
            ]
            if settings and (batch == 1 or weights not in _ALONE):
                yield cell, group, settings


def measure(given: argparse.Namespace) -> int:
    """Append what is missing to the file, until the time is over; what is left, in groups of prompts."""
    keep_policy_in(beside(given.file))
    end = time.monotonic() + 60 * given.minutes
    done: set[object] = {row.key for row in load(given.file)}
    left = 0
    for round_, quantize in product(range(given.rounds), given.quantize):
        missing = list(work(given, quantize if machine() else quantize + LIBRARY, done, round_))
        if not missing or time.monotonic() >= end:
            left += len(missing)
            continue
        with LLM(quantize=quantize, speculate=None, drafters=given.speculate, cache_tokens=32_768) as llm:
            measurement = Measurement(llm, given.tokens)
            measurement.warm_up(given.speculate, max(given.batch))
            for turn, (cell, group, settings) in enumerate(missing):
                if time.monotonic() >= end:
                    left += len(missing) - turn
                    break
                append(given.file, measurement.rows(cell, group, round_, settings, turn + round_))
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quantize", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--speculate", nargs="+", default=["auto", "suffix", "eagle3", "suffix+eagle3"])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--each", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop between two answers after so long")
    parser.add_argument("--show", action="store_true", help="show what was measured")
    given = parser.parse_args()
    if not given.show:
        torch.set_num_threads(given.threads)
        begun = time.monotonic()
        left = measure(given)
        rest = f"; {left} groups of prompts are left: run it again" if left else ""
        print(f"{(time.monotonic() - begun) / 60:.1f} minutes{rest}\n")
    show(load(given.file))


if __name__ == "__main__":
    main()
