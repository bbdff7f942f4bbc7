"""A real pair on a CPU: a target, a draft model of its family, and what the policy makes of them.

    python -m benchmarks.pair FILE --questions FOLDER [-m qwen2.5-coder-1.5b] [--draft qwen2.5-coder-0.5b]
                              [--quantize int8] [--speculate ...] [--each 3] [--tokens 128] [--rounds 1] [--threads 2]
    python -m benchmarks.pair FILE --show

Each `.jsonl` file of FOLDER is a task, in any format that `slipstream bench --prompts` reads; its first questions are
answered greedily with every setting, one right after the other, by the target's chat template. What was measured is
appended to FILE, and a run that was stopped goes on where it was. Speed-ups are from arrival to last token. The
acceptance at a depth is the share of the steps that offered a node there in which one was accepted.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path

import torch

from benchmarks.cell_figures import figure
from benchmarks.cells import Cell, Measurement, Row, append, beside, keep_policy_in, learns, load
from slipstream import LLM, SamplingParams
from slipstream.bench.prompts import BenchPrompt, read_file
from slipstream.bench.schedule import PLAIN

SETTINGS = [
    "suffix",
    "draft_model:model={draft},depth=4",
    "draft_model:model={draft},depth=4,branch=3",
    "suffix+draft_model:model={draft},depth=4",
    "cascade:suffix+draft_model:model={draft},depth=4",
    "auto:model={draft}",
]
_CONTEXT = 2048


def questions(folder: Path, each: int) -> list[tuple[str, BenchPrompt]]:
    """The first questions of each file, files in turns."""
    columns = [[(file.stem, prompt) for prompt in read_file(file)[:each]] for file in sorted(folder.glob("*.jsonl"))]
    return [entry for entry in chain.from_iterable(zip_longest(*columns)) if entry is not None]


def measure(given: argparse.Namespace) -> None:
    """Append what is missing to the file."""
    settings = [PLAIN, *(setting.format(draft=given.draft) for setting in given.speculate)]
    asked = questions(given.questions, given.each)
    found = {(row.cell, row.prompt, row.round, row.setting) for row in load(given.file)}
    llm = LLM(
        given.model,
        quantize=given.quantize,
        speculate=None,
        drafters=settings,
        max_model_len=_CONTEXT,
        cache_tokens=2 * _CONTEXT,
    )
    for setting in settings:  # memory is touched and programs are compiled before anything is measured
        llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=8, speculate=setting))
    measurement = Measurement(llm, settings, given.tokens)
    for round_ in range(given.rounds):
        for turn, (task, prompt) in enumerate(asked):
            cell = Cell(given.quantize, 1, 0.0, task)
            if all((cell, prompt.name, round_, setting) in found for setting in settings):
                continue
            rows = [json.dumps(asdict(row)) for row in measurement.rows(cell, [prompt], round_, turn + round_)]
            with given.file.open("a") as out:
                out.write("\n".join(rows) + "\n")
    llm.close()


def show(rows: list[Row]) -> None:
    """Speed-up and tokens per step by setting and task; then acceptance by depth."""
    tasks = list(dict.fromkeys(row.kind for row in rows))
    settings = [setting for setting in dict.fromkeys(row.setting for row in rows) if setting != PLAIN]
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.setting, row.kind].append(row)

    def speed(setting: str, task: str) -> str:
        mine = groups[setting, task]
        found = figure([*groups[PLAIN, task], *mine], setting)
        steps = sum(row.stats["steps"] for row in mine)
        text = "" if found.identical else " texts differ!"
        return f"{found.value:.2f}x {sum(row.tokens for row in mine) / steps:.2f}{text}"

    def acceptance(setting: str, task: str) -> str:
        columns = (
            map(sum, zip_longest(*(row.stats[name] for row in groups[setting, task]), fillvalue=0))
            for name in ("accepted_by_depth", "offered_by_depth")
        )
        return " ".join(f"{accepted / offered:.2f}" for accepted, offered in zip(*columns, strict=False) if offered)

    _table("speed-up and tokens per step", tasks, settings, speed)
    print()
    _table("acceptance at depth 1, 2, ...", tasks, settings, acceptance)


def _table(title: str, tasks: list[str], settings: list[str], cell: Callable[[str, str], str]) -> None:
    print(f"| {title} | {' | '.join(tasks)} |")
    print("| --- |" + " ---: |" * len(tasks))
    for setting in settings:
        print(f"| `{setting}` | {' | '.join(cell(setting, task) for task in tasks)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=Path, metavar="FOLDER")
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--speculate", nargs="+", default=SETTINGS)
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="show what was measured")
    given = parser.parse_args()
    if not given.show:
        if given.questions is None:
            parser.error("--questions: a folder of .jsonl files")
        torch.set_num_threads(given.threads)
        measure(given)
    show(load(given.file))


if __name__ == "__main__":
    main()
