"""Two levels or three? A draft model alone, and the same one with `suffix` drafting for it, on any target.

    python -m benchmarks.cascade -m TARGET --draft MODEL [--depths 3,6] [--tokens 96] [--threads 2] [--json FILE]

Greedy answers to prompts that copy, that summarise and that do neither. Each drafter answers all prompts, and plain
decoding answers them right after it; speed-ups compare the two. `passes` are the draft model's passes per step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import KINDS
from slipstream import LLM, SamplingParams
from slipstream.models.model import Model
from slipstream.types import Stats


def answer_all(llm: LLM, prompts: list[str], tokens: int) -> tuple[Stats, list[list[int]]]:
    total, said = Stats(), []
    for prompt in prompts:
        how = SamplingParams(temperature=0.0, max_tokens=tokens)
        # A model without chat training continues the text.
        chats = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        (output,) = llm.chat([{"role": "user", "content": prompt}], how) if chats else llm.generate(prompt, how)
        total.add(output.stats)
        said.append(output.token_ids)
    return total, said


class Counted:
    """Counts the passes of a model while active."""

    def __init__(self, model: Model) -> None:
        self.passes = 0
        forward = model.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            return forward(*args, **kwargs)

        model.forward = counting  # type: ignore[method-assign]


def draft_model_of(drafter: Any) -> Model:
    """The model of the last level."""
    level = drafter._models[-1] if hasattr(drafter, "_models") else drafter
    return level._model  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--depths", default="3,6")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(arguments.model, speculate=None, max_model_len=1024)
    rows: list[dict[str, Any]] = []
    print("| prompts | drafter | speed-up | tokens per step | passes of the draft per step | text |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for depth in map(int, arguments.depths.split(",")):
        draft = {"method": "draft_model", "model": arguments.draft, "depth": depth}
        stack = {"method": "cascade", "levels": ["suffix", draft]}
        for name, speculate in ((f"draft_model, {depth}", draft), (f"suffix, draft_model, {depth}", stack)):
            for kind, prompts in KINDS.items():
                llm.use(speculate)
                counted = Counted(draft_model_of(llm.drafter))
                drafted, said = answer_all(llm, prompts, arguments.tokens)
                llm.use(None)
                plain, expected = answer_all(llm, prompts, arguments.tokens)
                row = {
                    "prompts": kind,
                    "drafter": name,
                    "speed-up": drafted.tokens_per_second / plain.tokens_per_second,
                    "tokens per step": drafted.tokens_per_step,
                    "passes per step": counted.passes / drafted.steps,
                    "identical": said == expected,
                }
                rows.append(row)
                text = "identical" if row["identical"] else "DIFFERS"
                figures = f"{row['speed-up']:.2f}x | {row['tokens per step']:.2f} | {row['passes per step']:.2f}"
                print(f"| {kind} | {name} | {figures} | {text} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
