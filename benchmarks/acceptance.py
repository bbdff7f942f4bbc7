"""Tokens per step of trained drafters by real decoding: per task, at several tree sizes, without looping answers.

    python -m benchmarks.acceptance --speculate eagle3 medusa [--nodes 8 16 32 64] [--chain 5] [--questions FILE]
                                    [--each 8] [--tokens 256] [--temperature 0] [--verifier match] [--batch 16]
                                    [-m MODEL] [--json FILE]

Prompts: the 48 of `benchmarks/workload.jsonl`, or a file in the format of the Spec-Bench questions (`--each`: how many
of every category). An answer that ends in a loop is easy to draft and meaningless, so such answers are excluded from
the figures and counted. Tokens per step do not depend on the machine; speed is measured elsewhere.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.train.synth.loops import loop_start
from slipstream.types import Output, Stats

WORKLOAD = Path(__file__).parent / "workload.jsonl"


@dataclass(frozen=True)
class Row:
    """One drafter with one tree over all prompts."""

    drafter: str
    tokens_per_step: float  # over all answers that do not loop
    by_task: dict[str, float]
    by_depth: list[float]  # share of the steps that offered each depth in which the draft was accepted down to it
    loops: int  # excluded answers
    loops_tokens_per_step: float | None
    seconds: float
    identical: bool | None  # to plain decoding; None if a seed does not fix the text


def questions(file: Path, each: int) -> list[tuple[str, str]]:
    """(category, first turn)."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        found[entry["category"]].append(entry["turns"][0])
    return [(category, text) for category, texts in found.items() for text in texts[: each or None]]


def answers(llm: LLM, asked: list[tuple[str, str]], how: SamplingParams) -> list[Output]:
    return llm.chat([[{"role": "user", "content": text}] for _, text in asked], how)


def summed(stats: list[Stats]) -> Stats:
    total = Stats()
    for part in stats:
        total.add(part)
    return total


def row(name: str, asked: list[tuple[str, str]], outputs: list[Output], plain: list[Output], seconds: float) -> Row:
    looping = [loop_start(output.token_ids) is not None for output in outputs]
    by_task: dict[str, list[Stats]] = defaultdict(list)
    for (task, _), output, loops in zip(asked, outputs, looping, strict=True):
        if not loops:
            by_task[task].append(output.stats)
    total = summed([stats for group in by_task.values() for stats in group])
    circles = summed([o.stats for o, loops in zip(outputs, looping, strict=True) if loops])
    pairs = zip(total.accepted_by_depth, total.offered_by_depth, strict=True)
    return Row(
        drafter=name,
        tokens_per_step=total.tokens_per_step,
        by_task={task: summed(group).tokens_per_step for task, group in by_task.items()},
        by_depth=[accepted / max(1, offered) for accepted, offered in pairs],
        loops=sum(looping),
        loops_tokens_per_step=circles.tokens_per_step if any(looping) else None,
        seconds=seconds,
        identical=[o.token_ids for o in outputs] == [o.token_ids for o in plain] if plain else None,
    )


def shapes(arguments: argparse.Namespace, drafter: str) -> list[str]:
    joint = "," if ":" in drafter else ":"
    trees = [f"{drafter}{joint}nodes={nodes},branch={arguments.branch}" for nodes in arguments.nodes]
    return [f"{drafter}{joint}depth={arguments.chain},branch=1"] * bool(arguments.chain) + trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL)
    parser.add_argument("--speculate", nargs="+", required=True)
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--branch", type=int, default=8, help="children considered below a node")
    parser.add_argument("--chain", type=int, default=0, help="depth of a chain to measure too")
    parser.add_argument("--questions", type=Path, default=WORKLOAD)
    parser.add_argument("--each", type=int, default=0, help="questions of each category; 0: all")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verifier", default="match")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    asked = questions(arguments.questions, arguments.each)
    how = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.tokens, seed=1)
    llm = LLM(
        arguments.model,
        speculate=None,
        verifier=arguments.verifier,
        max_num_seqs=arguments.batch,
        max_model_len=2048,
        cache_tokens=arguments.batch * 2048 + 4096,
    )
    # On a GPU near-ties may be decided differently next to other rows, and then the texts diverge.
    plain = answers(llm, asked, how) if llm.exact and (arguments.verifier == "match" or how.greedy) else []
    print(f"{arguments.questions.name}: {len(asked)} prompts, T = {arguments.temperature}, {arguments.verifier}")
    tasks = list(dict.fromkeys(task for task, _ in asked))
    print("| drafter | tokens per step | loops excluded | " + " | ".join(tasks) + " | by depth | text |")
    print("| --- | ---: | ---: |" + " ---: |" * len(tasks) + " --- | --- |", flush=True)
    rows: list[dict[str, Any]] = []
    for drafter in arguments.speculate:
        for shape in shapes(arguments, drafter):
            llm.use(shape)
            began = time.perf_counter()
            outputs = answers(llm, asked, how)
            found = row(shape, asked, outputs, plain, time.perf_counter() - began)
            rows.append(asdict(found))
            cells = [f"{found.by_task.get(task, float('nan')):.2f}" for task in tasks]
            depths = " ".join(f"{share:.2f}" for share in found.by_depth)
            text = {True: "identical", False: "DIFFERS", None: "-"}[found.identical]
            figures = f"{found.tokens_per_step:.2f} | {found.loops} | " + " | ".join(cells)
            print(f"| `{shape}` | {figures} | {depths} | {text} |", flush=True)
    if arguments.json:
        settings = {k: str(v) for k, v in vars(arguments).items()}
        facts = {"torch": torch.__version__, "device": llm.model.device, "dtype": str(llm.model.dtype)}
        arguments.json.write_text(json.dumps({"settings": settings, **facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
