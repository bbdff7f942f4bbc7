"""Exported drafters in vLLM and here: acceptance lengths of chains, greedy, on the same prompts. SmolLM2-135M, float32.

    python -m benchmarks.peers.exported [--medusa DIR] [--depth 3] [--every 3] [--tokens 64] [--work DIR]

The shipped `eagle3`, in both of its layouts. `--medusa`: a checkpoint that was trained with `own_rows=true`. Prompts:
every third of `benchmarks/workload.jsonl`. vLLM gets its environment as in `python -m benchmarks.peers`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.acceptance import WORKLOAD, questions, summed
from benchmarks.peers.__main__ import prepare, usable_cores
from benchmarks.peers.environments import environment, run
from benchmarks.peers.table import PEERS
from slipstream import LLM, SamplingParams
from slipstream.folders import cache_directory

_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Case:
    """A drafter of ours and the layout in which vLLM gets it. `source`: a directory, or the method of a shipped one."""

    method: str
    layout: str
    source: str

    def drafter(self, depth: int) -> str:
        checkpoint = "" if self.source == self.method else f"checkpoint={self.source},"
        return f"{self.method}:{checkpoint}depth={depth},branch=1"


class Vllm:
    """vLLM in its environment."""

    def __init__(self, work: Path, target: str) -> None:
        self._peer, self._work, self._target = PEERS["vllm"], work, target
        self._python = environment("vllm", self._peer, work, _TIMEOUT)

    def answers(self, case: Case, depth: int, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        """`tokens` of each answer, and `drafts`, `drafted` and `accepted` of all, for a drafter that is exported."""
        place, log = self._work / "exported" / case.layout, self._work / "logs" / f"{case.layout}.log"
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        export = ["export", case.source, "--format", case.layout, "-o", str(place)]
        run([sys.executable, "-m", "slipstream", *export], log, _TIMEOUT)
        drafting = {"method": case.method, "model": str(place), "num_speculative_tokens": depth}
        task = {"model": self._target, "drafting": drafting, "prompts": prompts, "params": params}
        command = [self._python, "-m", "benchmarks.peers.vllm_exported", str(self._work)]
        answered: dict[str, Any] = json.loads(run(command, log, _TIMEOUT, json.dumps(task), preload=self._peer.preload))
        return answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medusa", type=Path, help="a checkpoint of heads with rows of their own")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--every", type=int, default=3, help="take every n-th prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, default=cache_directory() / "peers", help="environments, models and logs")
    arguments = parser.parse_args()
    work, depth = arguments.work.absolute(), arguments.depth
    cases = [Case("eagle3", layout, "eagle3") for layout in ("speculators", "sglang-eagle3")]
    if arguments.medusa:
        cases.append(Case("medusa", "vllm-medusa", str(arguments.medusa.absolute())))
    task = prepare(work, usable_cores(), arguments.tokens, 1, _TIMEOUT)
    vllm = Vllm(work, task.paths.directory)
    llm = LLM(dtype="float32", quantize="none", speculate=None, max_num_seqs=4, max_model_len=2048)
    assert llm.tokenizer is not None
    asked = questions(WORKLOAD, 0)[:: arguments.every]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for _, text in asked]
    params = {"temperature": 0.0, "max_tokens": arguments.tokens, "stop_token_ids": task.stop_ids}
    print("| drafter | layout | here | in vLLM | same texts |\n| --- | --- | ---: | ---: | ---: |", flush=True)
    for case in cases:
        llm.use(case.drafter(depth))
        ours = llm.generate(prompts, SamplingParams(**params))
        theirs = vllm.answers(case, depth, prompts, params)
        same = sum(one.token_ids == other for one, other in zip(ours, theirs["tokens"], strict=True))
        length = summed([output.stats for output in ours]).acceptance_length
        their_length = 1 + theirs["accepted"] / theirs["drafts"]
        row = f"{length:.3f} | {their_length:.3f} | {same} of {len(prompts)}"
        print(f"| `{case.method}` | {case.layout} | {row} |", flush=True)


if __name__ == "__main__":
    main()
