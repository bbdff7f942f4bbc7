"""Records what `tests/policy/test_trace.py` replays: reports of real steps, in which all that was drafted is verified.

    python -m tests.policy.record_trace

Milliseconds are those of the processor, on one thread: other programs change them less.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.bench.encoding import Encoder
from slipstream.bench.prompts import workload
from slipstream.policy import Report
from slipstream.policy.calibration import temperature_class

TRACE = Path(__file__).parent / "trace.json"
_KINDS, _TOKENS = ("code", "edit", "chat", "story"), 72
_RUNS = ((1, 0.0), (1, 1.0), (4, 0.0))  # sequences at a time, temperature


def recorded(report: Report) -> dict[str, Any]:
    """One step as plain data."""
    trees = []
    for item in report.progress:
        assert item.verified is not None
        tree, path = item.verified
        rounded = [round(sure, 3) for sure in tree.confidence]
        trees.append([temperature_class(item.sequence.params), tree.parents, tree.origins, rounded, list(path)])
    return {
        "context": sum(len(item.sequence.tokens) for item in report.progress) // len(trees),
        "rows": report.rows,
        "draft_ms": round(report.draft_ms, 3),
        "verify_ms": round(report.verify_ms, 3),
        "calls": [[call.drafter, call.levels, round(call.ms, 3), call.read, call.short] for call in report.calls],
        "trees": trees,
    }


def main() -> None:
    """Run a few answers of the built-in model."""
    torch.set_num_threads(1)
    setattr(time, "perf_counter", time.thread_time)  # noqa: B010
    llm = LLM(quantize="int8", speculate="auto", cache_tokens=16_384)
    encoder, policy, steps = Encoder(llm.get_tokenizer()), llm.engine.policy, list[dict[str, Any]]()
    prompts = [encoder.encode(next(p for p in workload() if p.category == kind)) for kind in _KINDS]
    observe = policy.observe

    def noted(report: Report) -> None:
        if report.prompt_rows == 0 and report.progress and all(item.verified for item in report.progress):
            steps.append(recorded(report))
        observe(report)

    setattr(policy, "select", policy._fixed.select)  # noqa: B010
    setattr(policy, "observe", noted)  # noqa: B010
    for together, temperature in _RUNS:
        how = SamplingParams(temperature=temperature, seed=1, max_tokens=_TOKENS, ignore_eos=True)
        dict(llm.answers([(prompt, how) for prompt in prompts], together, text=True))
    TRACE.write_text(json.dumps(steps, separators=(",", ":")) + "\n")
    llm.close()


if __name__ == "__main__":
    main()
