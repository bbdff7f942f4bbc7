"""Acceptance traces of device rounds, recorded on a CPU: the rounds that a GPU captures are called there.

    python -m benchmarks.round_traces suffix+eagle3:nodes=63,depth=6 --questions question.jsonl -o traces.jsonl

The speeds in such a trace mean nothing; the trees do: a body has those of its small model (docs/bodies.md). Name the
tree sizes that a GPU uses: `slipstream drafters NAME` prints its defaults.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.gpu.answers import questions
from slipstream import LLM, SamplingParams
from slipstream.bench.traces import TracedAnswer, Traces, drafters_of, save, steps_of
from tests.laned import burst_on_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    llm = LLM(given.model, speculate=given.setting, device="cpu", dtype="float32", quantize="none")
    traces, how = Traces({"model": given.model}), SamplingParams(temperature=0.0, max_tokens=given.tokens)
    with pytest.MonkeyPatch.context() as patch:
        llm.on_engine(lambda: burst_on_cpu(llm, patch))
        for number, (task, text) in enumerate(questions(given.questions, given.each)):
            prompt = llm.get_tokenizer().encode_chat([{"role": "user", "content": text}])
            deltas = list(llm.stream(prompt, how, trace=True))
            steps = tuple(steps_of(deltas, len(prompt)))
            who = drafters_of(deltas)
            traces.answers.append(TracedAnswer(given.setting, task, str(number), len(prompt), steps, drafters=who))
            print(f"{task}: {sum(step.tokens for step in steps)} tokens in {len(steps)} steps", flush=True)
            save(traces, given.output)
        llm.close()


if __name__ == "__main__":
    main()
