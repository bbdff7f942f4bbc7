"""Tokens per step and time of each verifier on the same drafts, at three temperatures. SmolLM2-135M, float32.

    python -m benchmarks.verifiers [--threads 2] [--tokens 64] [--seeds 2] [--json FILE]

The draft is the target without some of its layers (`layer_skip`), as a chain of 3 and as a tree of 9 nodes: good enough
to be accepted more often than not, with a q at every node. Under `match` its nodes are chosen, under the others they
are sampled if the request samples.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from slipstream import LLM, SamplingParams
from slipstream.commands.demo_prompts import PROMPTS
from slipstream.types import Stats

_SHAPES = {"chain of 3": "depth=3", "tree of 9": "depth=3,nodes=9,branch=3"}
_CHAINS, _TREES = ("match", "rejection", "block", "traversal"), ("match", "rejection", "traversal")
_VERIFIERS = {"chain of 3": _CHAINS, "tree of 9": _TREES}
_SKIP = "8/10/12/14/16/18/20/22"


@dataclass(frozen=True)
class Row:
    """One verifier on one shape at one temperature."""

    temperature: float
    shape: str
    verifier: str
    tokens_per_step: float
    ms_per_token: float


def measure(llm: LLM, temperature: float, tokens: int, seeds: int) -> Stats:
    total = Stats()
    for seed in range(seeds):
        how = SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens)
        for prompt in PROMPTS:
            (output,) = llm.chat([{"role": "user", "content": prompt.text}], how)
            total.add(output.stats)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"SmolLM2-135M float32, {arguments.threads} threads, torch {torch.__version__}\n")
    print("| verifier | draft | temperature | tokens per step | ms per token |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    rows = []
    for verifier in ("match", "rejection", "block", "traversal"):
        llm = LLM(speculate=None, verifier=verifier)
        for shape, options in _SHAPES.items():
            if verifier not in _VERIFIERS[shape]:
                continue
            llm.use(f"layer_skip:skip={_SKIP},{options}")
            for temperature in (0.0, 0.7, 1.0):
                stats = measure(llm, temperature, arguments.tokens, 1 if temperature == 0 else arguments.seeds)
                per_token = stats.decode_ms / max(1, stats.decoded)
                rows.append(Row(temperature, shape, verifier, stats.tokens_per_step, per_token))
                figures = f"{stats.tokens_per_step:.2f} | {per_token:.1f}"
                print(f"| `{verifier}` | {shape} | {temperature} | {figures} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
