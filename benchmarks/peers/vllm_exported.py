"""vLLM with a drafter in its layout: answers and how much was accepted. A task on stdin, a JSON object on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_COUNTS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print; stdout is ours
    # Read at import.
    os.environ["VLLM_CACHE_ROOT"] = f"{sys.argv[1]}/vllm"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # metrics are of this process
    import vllm  # type: ignore[import-not-found]

    task = json.load(sys.stdin)
    llm = vllm.LLM(
        task["model"],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        enforce_eager=True,  # compiling takes longer than the answers
        speculative_config=task["drafting"],
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    outputs = llm.generate(prompts, vllm.SamplingParams(**task["params"]), use_tqdm=False)
    counted: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    counts = {name: counted[f"vllm:spec_decode_{theirs}"].value for name, theirs in _COUNTS.items()}
    json.dump({"tokens": [list(output.outputs[0].token_ids) for output in outputs], **counts}, out)
    out.flush()


if __name__ == "__main__":
    main()
