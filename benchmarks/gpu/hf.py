"""The same body in transformers: plain, with prompt lookup, and with a small assistant model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bodies.bodies import BodyCheckpoint
from benchmarks.bodies.shapes import BodyShape
from slipstream.models.formats.hf_render import rendered_config
from slipstream.models.shapes import weight_names
from slipstream.train.joint.merged_model import hf_name

# The small model in the smallest body of the same vocabulary: what a user would take as an assistant.
ASSISTANT = BodyShape(768, 30, 12, 3, 64, 1536, 128_256)


@dataclass(frozen=True)
class Peer:
    """One way to decode."""

    name: str
    tok_s: float


def hf_model(body: BodyCheckpoint, dtype: torch.dtype) -> Any:
    """A body of dense layers as a model of transformers."""
    import transformers

    described, _ = rendered_config(body.config, body.name)
    with torch.device(body.placing.device), torch.random.fork_rng():
        torch.set_default_dtype(dtype)
        try:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**described))
        finally:
            torch.set_default_dtype(torch.float32)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in weight_names(body.config):
            weights[hf_name(body.config, name)].copy_(body.weight(name))
    return model.eval()


def peers(body: BodyCheckpoint, dtype: torch.dtype, prompts: list[list[int]], tokens: int) -> list[Peer]:
    """The decoding modes of transformers, greedy, one prompt after the other, without the time to the first token."""
    model = hf_model(body, dtype)
    assistant = hf_model(BodyCheckpoint(body.source, "assistant", ASSISTANT, "cuda", dtype), dtype)
    ways: dict[str, dict[str, Any]] = {
        "transformers, plain": {},
        "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10},
        "transformers, assisted by a 0.3B body": {"assistant_model": assistant},
    }
    return [Peer(name, _speed(model, prompts, tokens, options)) for name, options in ways.items()]


def _speed(model: Any, prompts: list[list[int]], tokens: int, options: dict[str, Any]) -> float:
    def seconds(prompt: list[int], count: int) -> float:
        ids = torch.tensor([prompt], device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        limits = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(prompts[0], 8)
    spent = sum(seconds(prompt, tokens) - seconds(prompt, 1) for prompt in prompts)
    return len(prompts) * (tokens - 1) / spent
