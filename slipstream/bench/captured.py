"""What a server captured: as prompts of the bench, and as traces for `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.traces import Step, TracedAnswer, Traces
from slipstream.errors import PromptError
from slipstream.train.captures import Record, read_captures
from slipstream.train.data import ChatData


def captured_prompts(folder: Path) -> list[BenchPrompt]:
    """Each prompt once, with its last temperature; if its answer was cut by length, the same length is its limit."""
    tokenizer: str = ChatData(folder).description["tokenizer"]
    found: dict[tuple[int, ...], BenchPrompt] = {}
    for number, record in enumerate(read_captures(folder)):
        sampling: dict[str, Any] = {"temperature": record["temperature"]}
        if record.get("finish_reason") == "length":
            sampling["max_tokens"] = len(record["token_ids"])
        ids, category = tuple(record["prompt_token_ids"]), record.get("category", folder.name)
        found[ids] = BenchPrompt(f"{folder.name}/{number}", category, ids=ids, tokenizer=tokenizer, sampling=sampling)
    if not found:
        raise PromptError(f"{str(folder)!r} has no prompts")
    return list(found.values())


def captured_traces(folder: Path) -> Traces:
    """The steps of all answers. Of trees only their sizes were kept: they cannot be replayed with fewer nodes."""
    answers = []
    for number, record in enumerate(read_captures(folder)):
        length = len(record["prompt_token_ids"])
        steps, context = list[Step](), length
        for nodes, tokens in [(0, 1), *_sizes(record)]:
            steps.append(Step(context, (0,) * nodes, (), (), tokens))
            context += tokens
        category, drafters = record.get("category", folder.name), tuple(record.get("drafters", ()))
        setting = "auto" if record["steps"] else "+".join(drafters) or "none"
        name = f"{folder.name}/{number}"
        answers.append(TracedAnswer(setting, category, name, length, tuple(steps), drafters=drafters))
    if not answers:
        raise PromptError(f"{str(folder)!r} has no answers")
    return Traces({"model": ChatData(folder).description.get("model", "")}, answers)


def _sizes(record: Record) -> list[tuple[int, int]]:
    """Nodes and tokens of each step after the first: as the policy decided them, or spread evenly over all steps."""
    left = len(record["token_ids"]) - 1
    known = [(int(nodes), int(tokens)) for nodes, tokens in record["steps"]]
    if known and sum(tokens for _, tokens in known) in (left, left + 1):
        return known if sum(tokens for _, tokens in known) == left else known[1:]
    steps = max(record["acceptance"]["steps"] - 1, 1 if left else 0)
    nodes, before = round(record["acceptance"]["drafted"] / max(1, steps)), 0
    found = []
    for step in range(1, steps + 1):
        found.append((nodes, round(left * step / steps) - before))
        before = round(left * step / steps)
    return [(nodes, tokens) for nodes, tokens in found if tokens]
