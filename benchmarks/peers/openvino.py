"""OpenVINO GenAI on CPU. A mode is a kind of weights, with or without prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from benchmarks.peers.protocol import First, Speaker, Task, serve


class TokenCounter(genai.StreamerBase):  # type: ignore[misc]
    """Receives tokens as they come, one by one or several at once."""

    def __init__(self, first: First) -> None:
        super().__init__()
        self.first = first

    def write(self, token: int | list[int]) -> Any:
        self.first(1 if isinstance(token, int) else len(token))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        return


class OpenVINO(Speaker):
    def __init__(self, mode: str, task: Task) -> None:
        weights, _, lookup = mode.partition(" ")
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # otherwise it would reuse a repeated prompt
        self.pipeline = genai.LLMPipeline(
            converted(task, weights),
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=task.threads,
            INFERENCE_PRECISION_HINT="f32",  # like all peers; the default is bfloat16 if the CPU supports it
            **({"prompt_lookup": True} if lookup else {}),
        )
        self.config = genai.GenerationConfig(
            max_new_tokens=task.max_tokens, do_sample=False, stop_token_ids=set(task.stop_ids)
        )
        if lookup:  # as in its documentation
            self.config.num_assistant_tokens, self.config.max_ngram_size = 5, 3

    def answer(self, ids: list[int], first: First) -> list[int]:
        prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
        return list(self.pipeline.generate(prompt, self.config, TokenCounter(first)).tokens[0])


def converted(task: Task, weights: str) -> Path:
    """The path of the model in OpenVINO's format."""
    return Path(task.paths.scratch) / f"openvino-{weights}"


if __name__ == "__main__":
    serve(OpenVINO, genai.__version__)
