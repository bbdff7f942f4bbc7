"""llama.cpp by way of llama-cpp-python, on the GGUF file itself."""

from __future__ import annotations

import llama_cpp  # type: ignore[import-not-found]
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

from benchmarks.peers.protocol import First, Speaker, Task, serve

_DRAFTED = 2  # tokens per step: its documentation's advice for machines without a GPU


class LlamaCpp(Speaker):
    def __init__(self, mode: str, task: Task) -> None:
        self.task = task
        self.llm = llama_cpp.Llama(
            task.paths.gguf,
            n_ctx=task.context,
            n_threads=task.threads,
            n_threads_batch=task.threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=_DRAFTED) if mode == "prompt lookup" else None,
            verbose=False,
        )

    def prepare(self) -> None:
        self.llm.reset()  # otherwise it would reuse a repeated prompt

    def answer(self, ids: list[int], first: First) -> list[int]:
        tokens: list[int] = []
        for token in self.llm.generate(ids, temp=0.0):
            tokens.append(token)
            first(1)
            if token in self.task.stop_ids or len(tokens) == self.task.max_tokens:
                break
        return tokens


if __name__ == "__main__":
    serve(LlamaCpp, llama_cpp.__version__)
