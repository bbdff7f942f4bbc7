"""Trained drafters on this CPU: questions of six tasks, plainly and drafted in turns. SmolLM2-135M, float32.

    python -m benchmarks.trained [--speculate eagle3 suffix+eagle3] [--each 8] [--tokens 96] [--threads 2]
                                 [--questions FILE] [--json FILE]

Every question is answered by plain decoding and right after that with each drafter, so that a speed-up compares
adjacent measurements. A task's speed-up is total time over total time per token, and so is that of all tasks together.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.acceptance import WORKLOAD, questions
from slipstream import LLM, SamplingParams
from slipstream.types import Output

PLAIN = "none"


@dataclass
class Total:
    """Sums over answers."""

    ms: float = 0.0
    tokens: int = 0
    steps: int = 0
    emitted: int = 0

    def add(self, output: Output) -> None:
        stats = output.stats
        self.ms += stats.decode_ms
        self.tokens += stats.decoded
        self.steps += stats.steps
        self.emitted += stats.emitted

    @property
    def ms_per_token(self) -> float:
        return self.ms / max(1, self.tokens)


@dataclass(frozen=True)
class Row:
    """One drafter."""

    drafter: str
    overall: float  # all questions together, over plain decoding
    by_task: dict[str, float]
    worst_question: float
    tokens_per_step: float
    identical: bool


def answers(llm: LLM, drafters: list[str], asked: list[tuple[str, str]], tokens: int) -> list[dict[str, Output]]:
    """The answers to all questions, plainly and right after that with each drafter."""
    how = SamplingParams(temperature=0.0, max_tokens=tokens)
    found = []
    for _, text in asked:
        outputs = {}
        for name in (PLAIN, *drafters):
            llm.use(name)
            outputs[name] = llm.chat([{"role": "user", "content": text}], how)[0]
        found.append(outputs)
    return found


def rows(drafters: list[str], asked: list[tuple[str, str]], answered: list[dict[str, Output]]) -> list[Row]:
    """The figures of each drafter."""
    totals: dict[str, dict[str, Total]] = {name: defaultdict(Total) for name in (PLAIN, *drafters)}
    worst, same = dict.fromkeys(drafters, float("inf")), dict.fromkeys(drafters, True)
    for (task, _), outputs in zip(asked, answered, strict=True):
        for name, output in outputs.items():
            totals[name][task].add(output)
            totals[name]["all"].add(output)
        plain = outputs[PLAIN]
        for name in drafters:
            drafted = outputs[name]
            same[name] &= drafted.token_ids == plain.token_ids
            if plain.stats.decoded > 8:  # answers of a few tokens are too short to time
                ratio = plain.stats.decode_ms / plain.stats.decoded * drafted.stats.decoded / drafted.stats.decode_ms
                worst[name] = min(worst[name], ratio)
    found = []
    for name in drafters:
        speedups = {task: totals[PLAIN][task].ms_per_token / total.ms_per_token for task, total in totals[name].items()}
        whole = totals[name]["all"]
        found.append(Row(name, speedups.pop("all"), speedups, worst[name], whole.emitted / whole.steps, same[name]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculate", nargs="+", default=["eagle3", "suffix+eagle3"])
    parser.add_argument("--questions", type=Path, default=WORKLOAD)
    parser.add_argument("--each", type=int, default=8, help="questions of each task")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    asked = questions(given.questions, given.each)
    found = rows(given.speculate, asked, answers(LLM(speculate=None), given.speculate, asked, given.tokens))
    print(
        f"SmolLM2-135M float32, {given.threads} threads, {len(asked)} questions of up to {given.tokens} tokens, greedy"
    )
    for row in found:
        tasks = ", ".join(f"{task} {ratio:.2f}x" for task, ratio in row.by_task.items())
        text = "every text that of plain decoding" if row.identical else "TEXTS DIFFER"
        print(f"{row.drafter}: {row.overall:.2f}x, {row.tokens_per_step:.2f} tokens per step; {tasks}; ", end="")
        print(f"worst question {row.worst_question:.2f}x; {text}")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
