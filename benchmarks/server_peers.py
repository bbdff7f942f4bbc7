"""Other servers and ours with the same model, prompts and client: tokens a second, TTFT and TPOT by clients at once.

    pip install xllamacpp    # in an environment of its own: llama.cpp with its server
    python -m benchmarks.server_peers --llama PYTHON [--only llama.cpp ours] [--json FILE]

Every server runs alone, on all cores, and is asked greedily by the client of `slipstream bench --url`. A point has its
own prompts, so that no server finds them in its cache; its first request is a warm-up of another kind. llama.cpp reads
the model's own file, and one in which all matrices are in Q8_0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.q8_0 import write_q8_0
from slipstream.bench.prompts import BenchPrompt, workload
from slipstream.bench.schedule import stratified
from slipstream.bench.serve.client import Address, Client
from slipstream.bench.serve.load import Load, Wire, offer
from slipstream.bench.serve.metrics import point
from slipstream.models.formats.builtin import DEFAULT_MODEL, fetch

LLAMA = Path(__file__).parent / "peers" / "llama_server.py"
CONTEXT = 2048  # of each client
MOST = 16  # clients at once
REQUESTS = {1: 8, 4: 16, 16: 48}
WARM_UP = BenchPrompt("warm-up", "", ({"role": "user", "content": "Count from one to twenty in words."},))


def commands(llama: str, eight_bits: Path, port: int) -> dict[str, list[str]]:
    """How each server is started; `llama`: the Python that has xllamacpp; `eight_bits`: the model in Q8_0."""
    ours = [sys.executable, "-m", "slipstream", "serve", "--port", str(port), "--no-access-log", "--quantize"]
    numbers = [str(number) for number in (port, MOST, CONTEXT, os.cpu_count() or 1)]
    return {
        "llama.cpp, Q4_1": [llama, str(LLAMA), str(fetch(DEFAULT_MODEL)), *numbers],
        "llama.cpp, Q8_0": [llama, str(LLAMA), str(eight_bits), *numbers],
        "ours, int4, plain": [*ours, "int4", "--speculate", "none"],
        "ours, int4, auto": [*ours, "int4"],
        "ours, int8, plain": [*ours, "int8", "--speculate", "none"],
        "ours, int8, auto": [*ours, "int8"],
    }


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A server that is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with status {process.returncode}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def is_ready(port: int) -> bool:
    """Whether the server has loaded its model."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


async def measure(port: int, prompts: list[BenchPrompt], at_once: int, tokens: int) -> dict[str, Any]:
    """The figures of one point."""
    client = Client(Address("127.0.0.1", port, "", False), {})
    wire = Wire(client, DEFAULT_MODEL, tokens)
    await wire.ask(WARM_UP)
    offered = await offer(wire, prompts, Load(at_once), 600.0, lambda done: None)
    await client.close()
    return point(offered, DEFAULT_MODEL, {})


def points(name: str, port: int, left: Iterator[BenchPrompt], tokens: int) -> dict[str, dict[str, Any]]:
    """The figures of one server, by clients at once."""
    found = {}
    for at_once, count in REQUESTS.items():
        asked = [next(left) for _ in range(count)]
        figures = found[f"{name}, {at_once}"] = asyncio.run(measure(port, asked, at_once, tokens))
        assert not figures["failed"], figures["errors"]
        print(
            f"| {name} | {at_once} | {figures['output_throughput']:.0f} | {figures['median_ttft_ms']:.0f} ms | "
            f"{figures['median_tpot_ms']:.1f} ms | {figures['total_output_tokens']} | "
            f"{figures['client_cpu_percent']:.0f}% of a core |",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama", default=sys.executable, metavar="PYTHON", help="that has xllamacpp")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    known = [one for one in workload() if not (one.turns or one.tools or one.wire or one.sampling)]
    prompts, found = [known[index] for index in stratified(known)], {}
    with TemporaryDirectory() as folder:
        eight_bits = Path(folder) / "q8_0.gguf"
        wanted = commands(given.llama, eight_bits, given.port)
        wanted = {name: line for name, line in wanted.items() if name.startswith(tuple(given.only))}
        if any(str(eight_bits) in line for line in wanted.values()):
            write_q8_0(fetch(DEFAULT_MODEL), eight_bits)
        print("| server | clients | tok/s | TTFT | TPOT | tokens | client's CPU |\n|" + " --- |" * 7)
        for name, line in wanted.items():
            with running(line, given.port):
                found.update(points(name, given.port, iter(prompts), given.tokens))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
