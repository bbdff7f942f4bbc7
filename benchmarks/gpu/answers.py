"""Whole answers to real questions, one after the other: tokens a second, plainly and with each drafter."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.steps import Step
from slipstream import LLM, Output, SamplingParams
from slipstream.types import Stats

_BRIEF = 24  # tokens
STRUCTURED = ("code", "json", "arithmetic", "coding", "math", "math_reasoning", "extraction")


@dataclass(frozen=True)
class Answered:
    """One drafter over all questions."""

    drafter: str
    tok_s: float
    structured: float  # tokens a second for code, maths and the like
    tokens_per_step: float
    step_ms: float  # wall clock, of all steps but the first of each answer
    by_task: dict[str, float]  # tokens a second
    same_as_plain: float | None = None  # share of all tokens before an answer's first difference
    worst: float | None = None  # the slowest question's tokens per second over plain decoding's
    draft_ms: float | None = None  # of a step: device time of this half after as much context
    verify_ms: float | None = None
    rest_ms: float | None = None  # wall clock minus both: the host, and waiting for it
    gb_per_s: float | None = None  # bandwidth of the target's weights; a step reads them once

    def beside(self, halves: Step | None, weights: int) -> Answered:
        """This row with the parts of a step, if known, and the bytes of weights that a row reads."""
        speed = weights / self.step_ms / 1e6
        if halves is None:
            return replace(self, gb_per_s=speed)
        draft, verify = halves.draft_ms, halves.verify_ms
        return replace(self, draft_ms=draft, verify_ms=verify, rest_ms=self.step_ms - draft - verify, gb_per_s=speed)


def questions(file: Path, each: int) -> list[tuple[str, str]]:
    """(task, text), `each` of every task; lines have category or task, and turns or prompt."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        text = entry["turns"][0] if "turns" in entry else entry["prompt"]
        found[entry.get("category") or entry["task"]].append(text)
    return [(task, text) for task, texts in found.items() for text in texts[:each]]


@dataclass(frozen=True)
class Answers:
    """What one drafter said, with its stats, question by question."""

    drafter: str
    tokens: list[list[int]]
    stats: list[Stats]
    tasks: list[str]

    def report(self, plain: Answers | None) -> Answered:
        """The figures, with plain decoding for comparison if that is another."""
        by_task: dict[str, list[Stats]] = defaultdict(list)
        for task, stats in zip(self.tasks, self.stats, strict=True):
            by_task[task].append(stats)
        total = _sum(self.stats)
        same = worst = None
        if plain is not None:
            agreed = sum(agreeing(a, b) for a, b in zip(self.tokens, plain.tokens, strict=True))
            same = agreed / sum(map(len, plain.tokens))
            pairs = zip(self.stats, plain.stats, strict=True)
            worst = min(a.tokens_per_second / b.tokens_per_second for a, b in pairs if b.decoded > 8)
        speeds = {task: _sum(stats).tokens_per_second for task, stats in by_task.items()}
        structured = _sum([s for task in STRUCTURED for s in by_task[task]]).tokens_per_second
        step_ms = total.decode_ms / max(1, total.steps - len(self.stats))
        per_step = total.tokens_per_step
        return Answered(self.drafter, total.tokens_per_second, structured, per_step, step_ms, speeds, same, worst)


def answer(llm: LLM, drafter: str, asked: list[tuple[str, str]], tokens: int) -> Answers:
    """Greedy answers, one question at a time."""
    llm.use(drafter)
    llm.warm_up()

    def answers(greeting: str, length: int) -> list[Output]:
        how = SamplingParams(temperature=0.0, max_tokens=length)
        return [llm.chat([{"role": "user", "content": greeting + text}], how)[0] for _, text in asked]

    answers("Well. ", _BRIEF)  # warm-up: prompts of new lengths make the library load kernels
    outputs = answers("", tokens)
    return Answers(drafter, [o.token_ids for o in outputs], [o.stats for o in outputs], [task for task, _ in asked])


def _sum(stats: list[Stats]) -> Stats:
    total = Stats()
    for one in stats:
        total.add(one)
    return total


def agreeing(one: list[int], other: list[int]) -> int:
    """How many tokens two answers have in common before they diverge."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
