"""Tiny LLMs on a GPU, decoding in rounds or by the host.

With SLIPSTREAM_EMULATE=1 on a machine without a GPU the same tests run on the CPU: the same code, called instead of
captured, with the attention of that machine. That checks the tests, not the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.engine.burst import Burst
from slipstream.engine.device import DeviceRunner
from slipstream.models.decoder import Decoder
from tests.engine.test_rounds import HEADS
from tests.heads import random_head
from tests.interpreted import DEVICE
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import tiny_llm

EMULATED = DEVICE == "cpu" and os.environ.get("SLIPSTREAM_EMULATE") == "1"
DTYPES = ["float32"] if DEVICE == "cpu" else ["float32", "float16", "bfloat16"]
PLAIN: dict[str, Any] = {}


def spec(name: str, options: dict[str, Any]) -> Any:
    """`eagle3` with a random head; `suffix+eagle3` with suffix beside it; `none` and `suffix` as they are."""
    beside, _, name = name.rpartition("+")
    if name in ("none", "suffix"):
        return name
    method, settings = HEADS.get(name, (name, {}))
    trees = {"method": method, "checkpoint": str(random_head(method, **settings)), **options}
    return {"method": "merge", "drafters": [beside, trees]} if beside else trees


class Made:
    """Makes LLMs, and closes them: graphs and K/V of one test are gone before the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._made: list[LLM] = []

    def rounds(self, name: str = "none", options: dict[str, Any] = PLAIN, **engine: Any) -> LLM:
        """An LLM whose drafter decodes in rounds."""
        llm = self._llm(name, options, engine)
        if EMULATED:
            burst_on_cpu(llm, self._monkeypatch)
        assert llm.engine.device is not None and llm.burst is not None
        return llm

    def host(self, name: str = "none", options: dict[str, Any] = PLAIN, **engine: Any) -> LLM:
        """An LLM that decodes by the host's steps."""
        llm = self._llm(name, options, engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceRunner, "possible", lambda state: False)
            llm.engine.set_runners()
        assert llm.engine.device is None
        return llm

    def _llm(self, name: str, options: dict[str, Any], engine: dict[str, Any]) -> LLM:
        given = {"context": 300, "characters": True, "device": DEVICE, "dtype": "float32", **engine}
        llm = tiny_llm(**given)
        self._made.append(llm)
        llm.use(spec(name, options))
        return llm

    def close(self) -> None:
        """All of them."""
        for llm in self._made:
            llm.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes LLMs for one test."""
    maker = Made(monkeypatch)
    yield maker
    maker.close()


@pytest.fixture
def table_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the logits after a token be a row of a table, whatever the layers compute: the same bits in every pass."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(97, 97, generator=generator) * 2
    run = Decoder.run_

    def embed(self: Decoder, tokens: torch.Tensor) -> torch.Tensor:
        rows = self._embed[tokens].clone()
        rows[..., 0] = tokens.to(rows.dtype)
        return rows

    def run_(self: Decoder, x: torch.Tensor, *rest: Any) -> dict[int, torch.Tensor]:
        """The layers write their K/V, and leave the tokens that they got."""
        tokens = x[:, 0].clone()
        tapped = run(self, x, *rest)
        x[:, 0] = tokens
        return tapped

    def head(self: Decoder, hidden: torch.Tensor, vocab: torch.Tensor | None = None) -> torch.Tensor:
        rows = tables[str(hidden.device)][hidden[:, 0].round().long()].to(hidden.dtype)
        return rows if vocab is None else rows[:, vocab]

    tables = {"cpu": table}
    if torch.cuda.is_available():
        tables["cuda:0"] = table.to("cuda:0")
    monkeypatch.setattr(Decoder, "embed", embed)
    monkeypatch.setattr(Decoder, "run_", run_)
    monkeypatch.setattr(Decoder, "head", head)
    monkeypatch.setattr(Decoder, "_as_programs", lambda self: None)  # in emulation: layers as they are on a GPU


def mixed(count: int, **more: Any) -> list[SamplingParams]:
    """Greedy and sampled requests of several lengths."""
    return [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40 + 7 * i, **more) for i in range(count)]


def recorded(burst: Burst) -> int:
    """How many graphs the bursts of an LLM have captured."""
    return len(burst.graphs._graphs)


__all__ = ["DEVICE", "DTYPES", "EMULATED", "Made", "burst_of", "made", "mixed", "recorded", "spec", "table_of_logits"]
