"""Every way to draft without training on six kinds of prompts, in one run. SmolLM2-135M, float32.

    python -m benchmarks.drafters [--threads 2] [--tokens 96] [--rounds 2] [--only "suffix;lookahead"]
                                  [--foreign DIR] [--json FILE]

Each drafter answers the demo's six prompts greedily, and plain decoding answers them right after it, so that a speed-up
compares adjacent measurements. Times are medians over the rounds. Drafters that are slower are shown too.

There is no smaller model with SmolLM2-135M's vocabulary, so `draft_model` here is SmolLM2 itself without some of its
layers, as a separate model. `--foreign` names a model of another vocabulary for `foreign_draft`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.twin import transformers_twin
from slipstream import LLM, SamplingParams
from slipstream.commands.corpus import build as corpus_build
from slipstream.commands.demo_prompts import PROMPTS
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.formats.resolve import open_checkpoint

_DRAFT_LAYERS = (*range(6), *range(24, 30))  # of the small model: the first and the last of the target's thirty


@dataclass(frozen=True)
class Answer:
    """One prompt, one drafter."""

    kind: str
    ms_per_token: float
    tokens_per_step: float
    token_ids: list[int]


@dataclass(frozen=True)
class Row:
    """One drafter over all prompts."""

    drafter: str
    speedup: dict[str, float]  # by kind of prompt
    tokens_per_step: dict[str, float]
    overall: float  # all prompts together: time of plain decoding over time of drafting
    identical: bool


def draft_model_directory(folder: Path) -> str:
    """SmolLM2 with 12 of its 30 layers, as a model on disk."""
    transformers_twin(open_checkpoint(DEFAULT_MODEL), _DRAFT_LAYERS).save_pretrained(folder)
    return str(folder)


def corpus_directory(folder: Path) -> str:
    """A corpus of the top level of Python's standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    corpus_build(tuple(map(str, sorted(library.glob("*.py")))), str(folder))
    return str(folder)


def specs(draft: str, corpus: str, foreign: str | None) -> dict[str, Any]:
    """What is measured: a name for the table, and the drafter."""
    model = {"method": "draft_model", "model": draft, "depth": 3}
    found: dict[str, Any] = {
        "ngram": "ngram",
        "suffix": "suffix",
        "suffix, Python corpus": f"suffix:corpus={corpus}",
        "lookahead": "lookahead",
        "early_exit": "early_exit:depth=2",
        "layer_skip": "layer_skip:depth=2",
        "draft_model": model,
        "draft_model, tree": {**model, "nodes": 9, "branch": 3},
        "suffix+draft_model": {"method": "merge", "drafters": ["suffix", model]},
        "cascade of suffix, draft_model": {"method": "cascade", "levels": ["suffix", {**model, "depth": 6}]},
    }
    if foreign is not None:
        found["foreign_draft"] = {"method": "foreign_draft", "model": foreign}
    return found


def answers(llm: LLM, tokens: int, rounds: int) -> list[Answer]:
    how = SamplingParams(temperature=0.0, max_tokens=tokens)
    given = []
    for prompt in PROMPTS:
        times = []
        for _ in range(rounds):
            (output,) = llm.chat([{"role": "user", "content": prompt.text}], how)
            times.append(output.stats.decode_ms / max(1, output.stats.decoded))
        median = statistics.median(times)
        given.append(Answer(prompt.kind, median, output.stats.tokens_per_step, output.token_ids))
    return given


def measure(llm: LLM, name: str, speculate: Any, tokens: int, rounds: int) -> Row:
    llm.use(speculate)
    drafted = answers(llm, tokens, rounds)
    llm.use(None)
    plain = answers(llm, tokens, rounds)
    pairs = list(zip(plain, drafted, strict=True))
    return Row(
        drafter=name,
        speedup={p.kind: p.ms_per_token / d.ms_per_token for p, d in pairs},
        tokens_per_step={d.kind: d.tokens_per_step for d in drafted},
        overall=sum(p.ms_per_token * len(p.token_ids) for p in plain)
        / sum(d.ms_per_token * len(d.token_ids) for d in drafted),
        identical=all(p.token_ids == d.token_ids for p, d in pairs),
    )


def show_title(threads: int) -> None:
    kinds = [prompt.kind for prompt in PROMPTS]
    print(f"SmolLM2-135M float32, {threads} threads, torch {torch.__version__}: speed-up over plain decoding")
    print("(and tokens per step), greedy; the same process, plain decoding right after each drafter\n")
    print("| drafter | " + " | ".join(kinds) + " | all | text |")
    print("| --- |" + " ---: |" * (len(kinds) + 1) + " --- |", flush=True)


def show(row: Row) -> Row:
    cells = [f"{row.speedup[prompt.kind]:.2f}x ({row.tokens_per_step[prompt.kind]:.2f})" for prompt in PROMPTS]
    text = "identical" if row.identical else "DIFFERS"
    print(f"| {row.drafter} | " + " | ".join(cells) + f" | {row.overall:.2f}x | {text} |", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", help="names of the table, separated by semicolons")
    parser.add_argument("--foreign", help="a model of another vocabulary")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(speculate=None)
    with tempfile.TemporaryDirectory() as folder:
        draft = draft_model_directory(Path(folder) / "draft")
        corpus = corpus_directory(Path(folder) / "corpus")
        wanted = specs(draft, corpus, arguments.foreign)
        if arguments.only:
            names = [name.strip() for name in arguments.only.split(";")]
            if unknown := set(names) - set(wanted):
                parser.error(f"{', '.join(unknown)}: not in the table; valid: {'; '.join(wanted)}")
            wanted = {name: wanted[name] for name in names}
        answers(llm, 8, 1)  # warm-up
        show_title(arguments.threads)
        rows = [show(measure(llm, name, spec, arguments.tokens, arguments.rounds)) for name, spec in wanted.items()]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
