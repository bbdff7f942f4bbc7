"""Slipstream, in the environment that runs the benchmark. A mode is a kind of weights and, if it drafts, a drafter."""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.peers.protocol import First, Speaker, Task, serve
from slipstream import LLM, SamplingParams, __version__
from slipstream.cache import PAGE_SIZE


@cache
def load(weights: str, path: str, context: int) -> LLM:
    return LLM(path, speculate=None, max_model_len=context, quantize="none" if weights == "float32" else weights)


class Ours(Speaker):
    def __init__(self, mode: str, task: Task) -> None:
        torch.set_num_threads(task.threads)
        weights, _, drafter = mode.partition(" ")
        self.llm = load(weights, task.paths.gguf, task.context)
        self.drafter = drafter or None
        self.params = SamplingParams(temperature=0, max_tokens=task.max_tokens)
        self.prepare()

    def prepare(self) -> None:
        """Drop cached pages, and rebuild the drafter without what it has seen."""
        cache = self.llm.cache
        table = cache.open([])
        cache.reserve(table, cache.capacity * PAGE_SIZE)
        cache.release(table)
        self.llm.use(self.drafter)

    def answer(self, ids: list[int], first: First) -> list[int]:
        tokens: list[int] = []
        for delta in self.llm.stream(ids, self.params):
            tokens += delta.token_ids
            first(len(tokens))
        return tokens


if __name__ == "__main__":
    serve(Ours, __version__)
