"""Data that the tiny target wrote, and short trainings on it, for tests of training."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.train.config import TrainConfig
from slipstream.train.data import ChatWriter
from slipstream.train.run import TrainJob
from tests.tiny import tiny_directory

VOCAB_SIZE = 97
LAYERS_SAY = 0.03  # of what they would say in a random model
_FOLDER = Path(tempfile.mkdtemp(prefix="slipstream-chats-"))


@functools.cache
def target() -> Path:
    """A tiny target that can be learnt: its layers add little to what the last token says."""
    place = _FOLDER / "target"
    shutil.copytree(tiny_directory(0, context=300, characters=True), place)
    weights = load_file(place / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(LAYERS_SAY)
    save_file(weights, place / "model.safetensors")
    return place


@functools.cache
def tiny_llm() -> LLM:
    """It, loaded."""
    return LLM(target(), speculate=None)


@functools.cache
def written(count: int = 120, length: int = 48) -> Path:
    """A data set of greedy and sampled answers to random prompts."""
    llm, chooser = tiny_llm(), random.Random(1)
    prompts = [[chooser.randrange(VOCAB_SIZE) for _ in range(chooser.randrange(2, 24))] for _ in range(count)]
    temperatures = [0.7 * (number % 2) for number in range(count)]
    how = [SamplingParams(temperature=t, max_tokens=length, seed=n) for n, t in enumerate(temperatures)]
    place = _FOLDER / f"data-{count}-{length}"
    with ChatWriter(place, fingerprint=llm.model.fingerprint, vocab_size=VOCAB_SIZE, model="tiny") as writer:
        for prompt, temperature, output in zip(prompts, temperatures, llm.generate(prompts, how), strict=True):
            writer.append([*prompt, *output.token_ids], len(prompt), temperature=temperature)
    return place


def order(method: str, out: Path, course: dict[str, Any] | None = None, **changes: Any) -> TrainJob:
    """A training of a few steps, with examinations of a few tokens."""
    settled = {"steps": 6, "tokens": 512, "evaluate": 3, "save": 2, "prompts": 2, "answer": 6, "rate": 5e-3}
    asked = {"data": (written(),), "model": str(target()), "settings": {"vocabulary": 80}, **changes}
    return TrainJob(method, out=out, config=TrainConfig(**{**settled, **(course or {})}), **asked)
