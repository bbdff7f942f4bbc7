"""transformers: greedy search, prompt lookup, and a smaller model that drafts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.protocol import First, Speaker, Task, serve


@cache
def load(directory: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class TokenCounter(BaseStreamer):  # type: ignore[misc]
    """Receives the prompt, then tokens as they come."""

    def __init__(self, first: First) -> None:
        self.first, self.prompt_seen = first, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.first(value.numel())
        self.prompt_seen = True

    def end(self) -> None:
        return


class Transformers(Speaker):
    def __init__(self, mode: str, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self.model = load(task.paths.directory)
        self.options = {
            "max_new_tokens": task.max_tokens,
            "do_sample": False,
            "eos_token_id": task.stop_ids,
            "pad_token_id": task.stop_ids[0],
            **self._drafting(mode, task),
        }

    def _drafting(self, mode: str, task: Task) -> dict[str, Any]:
        if mode == "prompt lookup":
            return {"prompt_lookup_num_tokens": 10}
        return {"assistant_model": load(task.paths.draft)} if mode == "assisted" else {}

    def answer(self, ids: list[int], first: First) -> list[int]:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        with torch.no_grad():
            tokens = self.model.generate(prompt, attention_mask=mask, streamer=TokenCounter(first), **self.options)[0]
        answered: list[int] = tokens[len(ids) :].tolist()
        return answered


if __name__ == "__main__":
    serve(Transformers, transformers.__version__)
