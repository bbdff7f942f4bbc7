"""Checks that `slipstream bench` finds a planted slowdown, and none without one: three runs on the default model.

    python -m benchmarks.slowdown [--speculate suffix+eagle3] [--minutes 3] [--part 0.1] [--busy 0] [--threads 2]
                                  [--output DIR]

The first two runs are the same; in the third each step of the drafted setting takes 10% (`--part`) longer, by a sleep
in its draft. `--busy 2` runs two busy processes beside all of them. Both outputs of `bench compare` are printed. It
fails unless the intervals of the first two speed-ups overlap, and the third speed-up is found to be below the first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.bench.compare import compare_results
from slipstream.bench.intervals import Interval
from slipstream.bench.results import load
from slipstream.commands.bench.tables import show_comparison
from slipstream.drafters.registry import drafter_class, parse_speculate

_LOOP = "while True: pass"


def plant(setting: str, part: float) -> None:
    """Make each step of a setting longer by `part`: a draft sleeps that share of the time since the previous one."""
    spec = parse_speculate(setting)
    kind: Any = drafter_class(spec.method).resolve_class(spec.options)
    propose, before, ended = kind.propose, tuple[Any, ...](), 0.0

    def slowly(self: Any, requests: Any) -> Any:
        nonlocal before, ended
        trees = propose(self, requests)
        asked, now = tuple(request.sequence for request in requests), time.perf_counter()
        if asked == before:  # not the first step of an answer, which waited for its prompt
            time.sleep(part * (now - ended))
        before, ended = asked, time.perf_counter()
        return trees

    kind.propose = slowly


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy processes beside the measurement."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measured(setting: str, minutes: float, threads: int, folder: Path, part: float) -> dict[str, Any]:
    """The results of `slipstream bench` in a process of its own, where a slowdown may be planted."""
    options = ["bench", "--speculate", setting, "--minutes", str(minutes), "--threads", str(threads), "-o", str(folder)]
    line = [sys.executable, "-m", "benchmarks.slowdown", "--planted", str(part), "--speculate", setting, "--", *options]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return load(folder / "results.json")


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a value in common."""
    if None in (*one, *other):
        return False
    return one.low <= other.high and other.low <= one.high  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculate", default="suffix+eagle3")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each run")
    parser.add_argument("--part", type=float, default=0.1, help="by which each step is slowed down")
    parser.add_argument("--busy", type=int, default=0, help="endless loops beside")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="keeps the three results")
    parser.add_argument("--planted", type=float, help=argparse.SUPPRESS)
    parser.add_argument("line", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.planted is not None:
        from slipstream.cli import main as slipstream

        if given.planted:
            plant(given.speculate, given.planted)
        sys.argv = ["slipstream", *given.line]
        slipstream()
        return
    with tempfile.TemporaryDirectory() as scratch, busy(given.busy):
        folder = given.output or Path(scratch)
        runs = {}
        for name, part in (("first", 0.0), ("second", 0.0), ("slowed", given.part)):
            print(f"{name} run ...", flush=True)
            runs[name] = measured(given.speculate, given.minutes, given.threads, folder / name, part)
    same, slowed = (compare_results(runs["first"], runs[name]) for name in ("second", "slowed"))
    for title, compared in (("the same twice", same), (f"each step {given.part:.0%} slower", slowed)):
        print(f"\n{title}")
        show_comparison(compared)
    (alike,), (slower,) = same["settings"], slowed["settings"]
    alike_found = overlap(Interval(*alike["first"]), Interval(*alike["second"]))
    slower_found = Interval(*slower["change"]).below_one
    print(f"\nthe first two overlap: {'yes' if alike_found else 'NO'}; the slowdown is found: ", end="")
    print("yes" if slower_found else "NO")
    sys.exit(0 if alike_found and slower_found else 1)


if __name__ == "__main__":
    main()
