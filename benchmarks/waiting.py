"""How threads should wait for each other: plain decoding under OpenMP settings, alone and beside a busy process.

    python -m benchmarks.waiting -m smollm2-135m

Each setting has its own process, because OpenMP reads it when it is loaded. All of them answer in turns, so that noise
affects them alike; reported are the median and the best of the rounds, in tokens per second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

# Not `active`: its threads would spin during the others' turns.
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 100,000": {"GOMP_SPINCOUNT": "100000"},
}
_TOKENS = 32
_BUSY = "while True: pass"


class Worker:
    """A process that decodes on request."""

    def __init__(self, model: str, quantize: str, setting: dict[str, str]) -> None:
        own = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
        command = [sys.executable, "-m", "benchmarks.waiting", "--worker", "-m", model, "--quantize", quantize]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own | setting
        )

    def rate(self) -> float:
        """Tokens per second of one answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait()


def work(model: str, quantize: str) -> None:
    """Answer repeatedly, and report the speed."""
    from slipstream import LLM, SamplingParams

    llm = LLM(model, speculate="none", quantize=quantize)
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    for _ in sys.stdin:
        output = llm.generate(["def fibonacci(n):"], params)[0]
        print(1000 * output.stats.decoded / output.stats.decode_ms, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.model, given.quantize)
        return
    workers = {name: Worker(given.model, given.quantize, setting) for name, setting in SETTINGS.items()}
    try:
        for worker in workers.values():
            worker.rate()
        for busy in (0, 1):
            others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(busy)]
            try:
                rates: dict[str, list[float]] = {name: [] for name in workers}
                for _ in range(given.rounds):
                    for name, worker in workers.items():
                        rates[name].append(worker.rate())
                        time.sleep(0.05)  # threads that still spin would slow down the next one
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            print("alone" if not busy else "beside a busy process")
            for name, found in rates.items():
                print(f"  {name:14} median {statistics.median(found):6.1f}  best {max(found):6.1f}")
    finally:
        for worker in workers.values():
            worker.end()


if __name__ == "__main__":
    main()
