"""A real pair on a CPU: a target, a draft model of its family, and what the policy makes of them.

    python -m benchmarks.pair FILE --questions FOLDER [-m qwen2.5-coder-1.5b] [--draft qwen2.5-coder-0.5b]
                              [--quantize int8] [--speculate ...] [--each 3] [--tokens 128] [--rounds 1] [--threads 2]
    python -m benchmarks.pair FILE --show

Each `.jsonl` file of FOLDER is a task, in any format that `slipstream bench --prompts` reads; its first questions are
answered greedily with every setting, one right after the other, by the target's chat template. `auto` knows nothing of
the pair, and a few questions are no time to learn: it answers all of them once before anything counts, and what it
learns is kept in FILE.policy. What was measured is appended to FILE, and a run that was stopped goes on where it was.
Speed-ups are from arrival to last token. The best fixed setting is chosen for each task afterwards, which favours it.
The acceptance at a depth is the share of the steps that offered a node there in which one was accepted.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, product, zip_longest
from pathlib import Path

import torch

from benchmarks.cell_figures import figure
from benchmarks.cells import Cell, Measurement, Row, append, beside, keep_policy_in, learns, load
from slipstream import LLM
from slipstream.bench.prompts import BenchPrompt, read_file

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
    keep_policy_in(beside(given.file))
    settings = [setting.format(draft=given.draft) for setting in given.speculate]
    asked = questions(given.questions, given.each)
    done = {row.key for row in load(given.file)}
    work = []
    for round_, (task, prompt) in product(range(given.rounds), asked):
        cell = Cell(given.quantize, 1, 0.0, task)
        left = [setting for setting in settings if (cell, prompt.name, round_, setting) not in done]
        if left:
            work.append((cell, prompt, round_, left))
    if not work:
        return
    with LLM(
        given.model,
        quantize=given.quantize,
        speculate=None,
        drafters=settings,
        max_model_len=_CONTEXT,
        cache_tokens=2 * _CONTEXT,
    ) as llm:
        measurement = Measurement(llm, given.tokens)
        measurement.warm_up(settings)
        wanted = {setting for *_, left in work for setting in left}
        for setting in filter(learns, settings):
            if setting in wanted:
                measurement.practise(setting, [prompt for _, prompt in asked])
        for turn, (cell, prompt, round_, left) in enumerate(work):
            append(given.file, measurement.rows(cell, [prompt], round_, left, turn + round_))


def show(rows: list[Row]) -> None:
    """Speed-up and tokens per step by setting and task, `auto` beside the best fixed one; then acceptance by depth."""
    tasks = list(dict.fromkeys(row.kind for row in rows))
    settings = list(dict.fromkeys(row.setting for row in rows))
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.setting, row.kind].append(row)

    def speed(setting: str, task: str) -> str:
        mine = groups[setting, task]
        if not mine:
            return ""
        found = figure(mine)
        timing = "" if found.timing is None else f" ±{100 * found.timing:.0f}%"
        text = "" if found.identical else " texts differ!"
        return f"{found.value:.2f}x{timing} {sum(row.tokens for row in mine) / _steps(mine):.2f}{text}"

    def over_best(setting: str, task: str) -> str:
        fixed = [groups[other, task] for other in settings if not learns(other) and groups[other, task]]
        if not fixed or not groups[setting, task]:
            return ""
        best = max(fixed, key=lambda listed: figure(listed).value)
        return f"{figure(groups[setting, task]).value / figure(best).value:.2f} of `{best[0].setting}`"

    def acceptance(setting: str, task: str) -> str:
        columns = (
            map(sum, zip_longest(*(row.stats[name] for row in groups[setting, task]), fillvalue=0))
            for name in ("accepted_by_depth", "offered_by_depth")
        )
        return " ".join(f"{accepted / offered:.2f}" for accepted, offered in zip(*columns, strict=False) if offered)

    _table("speed-up and tokens per step", tasks, settings, speed)
    print()
    _table("over the best fixed setting", tasks, list(filter(learns, settings)), over_best)
    print()
    _table("acceptance at depth 1, 2, ...", tasks, settings, acceptance)


def _steps(rows: list[Row]) -> int:
    return sum(int(row.stats["steps"]) for row in rows)


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
