"""Predicted outputs: how much faster an answer comes if an earlier version of it is known.

    python -m benchmarks.prediction [--model qwen2.5-coder-1.5b] [--quantize int8] [--threads 2] [--tokens 400]
                                    [--speculate auto] [--rounds 1] [--json FILE]

Two tasks. *elsewhere*: the prompt describes a module and does not hold it; the prediction is the model's own answer
with three lines changed, as an editor that has an older version would send it. *in the prompt*: the prompt holds a file
and asks for three changes; the prediction is that file. Plain decoding, the drafter without the prediction (`drafted`)
and with it answer in turns, greedily; the tokens must be identical. Speed-ups are from arrival to last token, and of
decoding.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from slipstream import LLM, SamplingParams
from slipstream.types import Stats

MODULES = [
    "a stack, a queue and a priority queue, each a class with a docstring and tests",
    "a bank account with deposits, withdrawals, interest and a history of transactions",
    "a parser and an evaluator of arithmetic expressions with brackets",
]
FILE = '''"""Rectangles and circles."""

import math


class Rectangle:
    """A rectangle with two sides."""

    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        """The area of the rectangle."""
        return self.width * self.height

    def perimeter(self):
        """The perimeter of the rectangle."""
        return 2 * (self.width + self.height)

    def scale(self, factor):
        """A rectangle with both sides multiplied by a factor."""
        return Rectangle(self.width * factor, self.height * factor)


class Circle:
    """A circle with a radius."""

    def __init__(self, radius):
        self.radius = radius

    def area(self):
        """The area of the circle."""
        return math.pi * self.radius ** 2

    def perimeter(self):
        """The perimeter of the circle."""
        return 2 * math.pi * self.radius

    def scale(self, factor):
        """A circle with its radius multiplied by a factor."""
        return Circle(self.radius * factor)
'''
CHANGES = [
    "rename the method perimeter to circumference in both classes",
    "rename the class Rectangle to Box everywhere",
    "add a method diameter to Circle that returns twice the radius",
]


_WARM_UP = 24  # tokens
WAYS = ("plain", "drafted", "predicted")


@dataclass
class Total:
    """All answers of one way."""

    stats: Stats = field(default_factory=Stats)
    ms: float = 0.0  # from arrival to last token


@dataclass(frozen=True)
class Row:
    """One task: speed-ups with a prediction, and what became of it."""

    task: str
    over_plain: float
    over_drafted: float
    decode_over_plain: float
    decode_over_drafted: float
    tokens_per_step: float
    accepted: int
    rejected: int


def edited(text: str) -> str:
    """The text with three of its lines changed."""
    lines = text.split("\n")
    for place in (len(lines) // 5, len(lines) // 2, 4 * len(lines) // 5):
        lines[place] = lines[place].replace("return", "yield").replace("self", "this") + "  # to be changed"
    return "\n".join(lines)


def tasks(llm: LLM, tokens: int) -> dict[str, list[tuple[str, str]]]:
    """Prompts and their predictions, by kind."""
    asked = [f"Write a Python module with {module}. Answer with the code only." for module in MODULES]
    how = SamplingParams(temperature=0.0, max_tokens=tokens, speculate=False)
    written = llm.chat([[{"role": "user", "content": prompt}] for prompt in asked], how)
    held = f"```python\n{FILE}```\nRewrite this file: {'; '.join(CHANGES)}. Answer with the whole file only."
    return {
        "elsewhere": [(prompt, edited(output.text)) for prompt, output in zip(asked, written, strict=True)],
        "in the prompt": [(held, f"```python\n{FILE}```")],
    }


def measure(llm: LLM, task: str, pairs: list[tuple[str, str]], arguments: argparse.Namespace) -> Row:
    totals = {way: Total() for way in WAYS}
    for number in range(arguments.rounds + 1):  # the first one is short, and not counted
        for turn, (prompt, prediction) in enumerate(pairs):
            texts = set()
            for place in range(len(WAYS)):
                way = WAYS[(place + turn + number) % len(WAYS)]
                how = SamplingParams(
                    temperature=0.0,
                    max_tokens=arguments.tokens if number else _WARM_UP,
                    speculate=False if way == "plain" else None,
                    prediction=prediction if way == "predicted" else None,
                )
                llm.reset_prefix_cache()
                (output,) = llm.chat([{"role": "user", "content": prompt}], how)
                texts.add(tuple(output.token_ids))
                times = output.metrics
                assert times is not None and times.last_token_time is not None
                if number:
                    totals[way].stats.add(output.stats)
                    totals[way].ms += 1000 * (times.last_token_time - times.arrival_time)
            assert len(texts) == 1, "a prediction changed the text"
    plain, drafted, predicted = totals.values()
    accepted, rejected = predicted.stats.outcome_of("prediction")
    speed = predicted.stats.tokens_per_second
    return Row(
        task,
        plain.ms / predicted.ms,
        drafted.ms / predicted.ms,
        speed / plain.stats.tokens_per_second,
        speed / drafted.stats.tokens_per_second,
        predicted.stats.tokens_per_step,
        accepted,
        rejected,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--speculate", default="auto", help="a drafter that uses predictions")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(arguments.model, speculate=arguments.speculate, quantize=arguments.quantize)
    print("| the file is | over plain | over `drafted` | decoding | tokens per step | accepted | rejected |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    rows = []
    for task, pairs in tasks(llm, arguments.tokens).items():
        row = measure(llm, task, pairs, arguments)
        rows.append(row)
        whole = f"{row.over_plain:.2f}x | {row.over_drafted:.2f}x"
        decoding = f"{row.decode_over_plain:.2f}x, {row.decode_over_drafted:.2f}x"
        counts = f"{row.tokens_per_step:.2f} | {row.accepted} | {row.rejected}"
        print(f"| {task} | {whole} | {decoding} | {counts} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
