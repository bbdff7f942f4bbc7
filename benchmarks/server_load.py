"""A server under load: nothing lost, nothing wrong, memory flat, pages free; and its speed beside `LLM.generate`.

    python -m benchmarks.server_load [--only load|speed] [--streams 1000] [--rounds 3] [--json FILE]

Starts `slipstream serve` on a free port of 127.0.0.1 and ends it. Texts are compared with those of `LLM.generate` in
this process. Speeds are taken in turns. The client runs on the same cores; its CPU time is reported, and the ratio is
given with and without it: least, median and most of the rounds.

With four rounds of load or more, it is an error if memory grows by over 2% from the half of them to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.server.run import allow_connections

SUBJECTS = ["rivers", "the moon", "bread", "a small town", "numbers", "the sea", "an old clock", "trains"]
FORMS = ["Write a short story about {}.", "List facts about {}.", "Why do people like {}?", "Explain {} to a child."]
MOST_GROWTH = 0.02  # tolerated growth of memory over the second half of the rounds
PROMPTS = [form.format(subject) for form in FORMS for subject in SUBJECTS]


@dataclass(frozen=True)
class Job:
    """One request, and when its client leaves: after so many chunks, or never."""

    prompt: str
    tokens: int
    seed: int
    leaves_after: int | None

    @property
    def params(self) -> SamplingParams:
        """The same request for `LLM`."""
        return SamplingParams(temperature=0.7, top_p=0.95, seed=self.seed, max_tokens=self.tokens)

    @property
    def body(self) -> dict[str, Any]:
        """The same request for the server."""
        return {
            "messages": [{"role": "user", "content": self.prompt}], "temperature": 0.7, "top_p": 0.95,
            "seed": self.seed, "max_tokens": self.tokens, "stream": True,
        }  # fmt: skip


def jobs(count: int, most: int, leaving: float) -> list[Job]:
    """Requests of mixed length; the clients of some disconnect at random."""
    chooser = random.Random(7)
    return [
        Job(
            prompt=PROMPTS[number % len(PROMPTS)],
            tokens=chooser.randint(2, most),
            seed=number,
            leaves_after=chooser.randint(0, 12) if chooser.random() < leaving else None,
        )
        for number in range(count)
    ]


# -- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def server(arguments: list[str]) -> Iterator[tuple[int, int]]:
    """`slipstream serve`, warm: its port and its process."""
    command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", "--no-access-log", *arguments]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        found = re.search(r":(\d+)$", running.stderr.readline().strip())
        assert found is not None
        port = int(found[1])
        while asyncio.run(fetch(port, "/health"))[0] != 200:
            time.sleep(0.1)
        yield port, running.pid
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)


def resident(process: int) -> float:
    """Memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


# -- a client that costs little ---------------------------------------------------------------------------------------


async def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body.decode()


@dataclass
class Received:
    """What a client received."""

    text: str = ""
    done: bool = False
    left: bool = False
    first_s: float = 0.0


async def ask(port: int, job: Job) -> Received:
    """Send a request and read its stream, or leave."""
    received, chunks = Received(), 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        content, began = json.dumps(job.body).encode(), time.perf_counter()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        if job.leaves_after == 0:
            received.left = True
            return received
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                    raise RuntimeError(line.decode().strip())
                continue
            received.first_s = received.first_s or time.perf_counter() - began
            if line.startswith(b"data: [DONE]"):
                received.done = True
                return received
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            received.text += chunk["choices"][0]["delta"].get("content", "")
            chunks += 1
            if chunks == job.leaves_after:
                received.left = True
                return received
        return received
    finally:
        writer.close()


async def ask_all(port: int, wanted: list[Job], at_once: int) -> list[Received]:
    """All requests, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(job: Job) -> Received:
        async with gate:
            return await ask(port, job)

    return list(await asyncio.gather(*(one(job) for job in wanted)))


# -- what is measured -------------------------------------------------------------------------------------------------


def check(received: list[Received], wanted: list[Job], texts: dict[int, str]) -> dict[str, int]:
    """Count what was lost or wrong."""
    counts = {"whole": 0, "left": 0, "lost": 0, "wrong": 0}
    for one, job in zip(received, wanted, strict=True):
        text = texts[job.seed]
        right = one.text == text if one.done else text.startswith(one.text)
        counts["wrong" if not right else "whole" if one.done else "left" if one.left else "lost"] += 1
    return counts


def reference(llm: LLM, wanted: list[Job], at_once: int) -> tuple[dict[int, str], float, int]:
    """Texts, seconds and tokens of `LLM` for all requests, so many at a time."""
    began = time.perf_counter()
    prompts = (llm.chat_prompts([{"role": "user", "content": job.prompt}])[0] for job in wanted)
    pairs = ((prompt, job.params) for prompt, job in zip(prompts, wanted, strict=True))
    outputs = dict(llm.answers(pairs, at_once, text=True))
    seconds = time.perf_counter() - began
    texts = {job.seed: outputs[place].text for place, job in enumerate(wanted)}
    return texts, seconds, sum(len(output.token_ids) for output in outputs.values())


def idle_pages(port: int) -> bool:
    """Whether nothing runs and all pages are free, a moment after the last request."""
    for _ in range(100):
        text = asyncio.run(fetch(port, "/metrics"))[1]
        values = re.findall(r"^slipstream:(?:num_requests_\w+|kv_cache_usage_perc)\{.*\} (\S+)$", text, re.M)
        if len(values) == 3 and not any(map(float, values)):
            return True
        time.sleep(0.1)
    return False


def load(port: int, process: int, llm: LLM, wanted: list[Job], rounds: int) -> list[float]:
    """All requests at once, several times; the memory of the server in MiB, before and after each time."""
    texts, _, _ = reference(llm, wanted, len(wanted))
    asyncio.run(ask_all(port, wanted[:64], 64))  # warm
    memory = [resident(process)]
    for _ in range(rounds):
        began = time.perf_counter()
        counts = check(asyncio.run(ask_all(port, wanted, len(wanted))), wanted, texts)
        seconds = time.perf_counter() - began
        memory.append(resident(process))
        free = idle_pages(port)
        said = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"{len(wanted)} streams in {seconds:.0f} s: {said}; {memory[-1]:.0f} MiB; pages free: {free}", flush=True)
        assert free and not counts["lost"] and not counts["wrong"]
    return memory


def growth(memory: list[float]) -> float:
    """The growth of memory from half of the rounds to the end."""
    return memory[-1] / memory[len(memory) // 2] - 1


def spread(values: list[float]) -> dict[str, float]:
    """The spread over the rounds: least, median and most."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def speed(port: int, llm: LLM, wanted: list[Job], at_once: int, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second of the server and of `LLM`, in turns."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        _, alone, tokens = reference(llm, wanted, at_once)
        cpu, began = time.process_time(), time.perf_counter()
        asyncio.run(ask_all(port, wanted, at_once))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        found["llm_tokens_per_s"].append(tokens / alone)
        found["server_tokens_per_s"].append(tokens / wall)
        found["server_s"].append(wall)
        found["client_cpu_s"].append(cpu)
        found["ratio"].append(alone / wall)
        found["ratio_without_client_cpu"].append(alone / (wall - cpu / (os.cpu_count() or 1)))
    return {name: spread(values) for name, values in found.items()}


def first_token(port: int, llm: LLM, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds to the first token of one client, in turns; each prompt is new to the cache."""
    inside: list[float] = []
    outside: list[float] = []
    for number in range(rounds):
        job = Job(f"Number {number}: {PROMPTS[number % len(PROMPTS)]}", 4, number, None)
        began = time.perf_counter()
        stream = llm.stream([{"role": "user", "content": job.prompt}], job.params)
        next(stream)
        inside.append(1000 * (time.perf_counter() - began))
        list(stream)
        outside.append(1000 * asyncio.run(ask(port, job)).first_s)
    gaps = [b - a for a, b in zip(inside, outside, strict=True)]
    return {"llm_ttft_ms": spread(inside), "server_ttft_ms": spread(outside), "overhead_ms": spread(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--only", choices=["load", "speed"])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--at-once", type=int, default=16, help="clients, for the speed")
    parser.add_argument("--rounds", type=int, default=3, help="of the load; three times as many of the speed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    wanted = jobs(given.streams, given.tokens, 1 / 3)
    allow_connections()
    llm = LLM(given.model, quantize=given.quantize, speculate=given.speculate, max_num_seqs=64)
    found: dict[str, Any] = {}
    arguments = ["--model", given.model, "--quantize", given.quantize, "--speculate", given.speculate]
    with server([*arguments, "--max-queue", str(given.streams)]) as (port, process):
        if given.only != "speed":
            found["memory_mib"] = load(port, process, llm, wanted, given.rounds)
        if given.only != "load":
            some = jobs(4 * given.at_once, given.tokens, 0.0)
            asyncio.run(ask_all(port, some, given.at_once))  # warm
            found["speed"] = speed(port, llm, some, given.at_once, 3 * given.rounds)
            found["first_token"] = first_token(port, llm, 10 * given.rounds)
    for name in ("speed", "first_token"):
        for what, values in found.get(name, {}).items():
            print(f"{what}: " + ", ".join(f"{which} {value:.3f}" for which, value in values.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    memory = found.get("memory_mib", [])
    if memory:
        print(f"memory: {', '.join(f'{value:.0f}' for value in memory)} MiB; last half {growth(memory):+.1%}")
    if len(memory) > 4 and growth(memory) > MOST_GROWTH:
        raise SystemExit("memory still grows")


if __name__ == "__main__":
    main()
