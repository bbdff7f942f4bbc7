"""`exact`: where it is accepted, what is refused, and what the command line says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, attention
from slipstream.attention import BlockAttention
from slipstream.cache import PageTable
from slipstream.engine import core as facade
from slipstream.errors import OptionError
from slipstream.models import load
from slipstream.models.decoder import Decoder
from slipstream.models.formats.resolve import open_model
from slipstream.models.layers.exact_linear import ExactLinear
from slipstream.models.load import load_model, require_exact
from slipstream.models.weights import Weights
from slipstream.tree import TokenTree
from tests.checkpoints import refused
from tests.invoking import invoke
from tests.laned import tile_segments
from tests.models.foreign import foreign_directory
from tests.models.test_families import build
from tests.tiny import tiny_directory, tiny_llm


def test_on_a_cpu_it_is_a_check_and_nothing_more() -> None:
    asked, plain = tiny_llm(exact=True), tiny_llm()
    assert asked.exact and not asked.model.exact
    how = SamplingParams(temperature=0.0, max_tokens=8)
    assert asked.generate([[1, 2, 3]], how)[0].token_ids == plain.generate([[1, 2, 3]], how)[0].token_ids
    assert tiny_llm(exact=True, quantize="int8").exact


def test_a_machine_that_is_not_exact_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "is_exact", lambda model: False)
    with refused(OptionError, "exact", "this machine", "leave it out"):
        tiny_llm(exact=True)
    assert not tiny_llm().exact


def test_what_cannot_be_honoured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("mixtral", tmp_path)
    tiny, experts = open_model(tiny_directory()), open_model(tmp_path)
    with refused(OptionError, "exact", "bfloat16", "float32"):
        LLM(tiny_directory(), dtype="bfloat16", device="cpu", exact=True)
    require_exact(experts, torch.float32, "cpu")
    monkeypatch.setattr(load, "has_triton", lambda: True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        require_exact(tiny, dtype, "cuda:1")
    with refused(OptionError, "exact", "mixtures of experts", "cpu"):
        require_exact(experts, torch.bfloat16, "cuda")
    with refused(OptionError, "exact", "transformers", "leave it out"):
        require_exact(open_model(foreign_directory("gpt2")), torch.bfloat16, "cuda")
    monkeypatch.setattr(load, "has_triton", lambda: False)
    with refused(OptionError, "exact", "triton", "pip install"):
        require_exact(tiny, torch.bfloat16, "cuda")


def test_a_decoder_for_a_gpu_takes_its_products_and_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that believes to be on a GPU: which kernels it takes, not what they compute."""
    asked: list[bool] = []

    def over_tiles(tiles: Any, *shape: Any, exact: bool = False) -> BlockAttention:
        asked.append(exact)
        return BlockAttention(tile_segments(tiles), *shape)

    monkeypatch.setattr(attention, "over_tiles", over_tiles)
    model, _ = load_model(tiny_directory(), dtype="float32", device="cpu")
    assert isinstance(model, Decoder)
    segment = attention.tree_segment(PageTable([0]), 0, [1], TokenTree(1))
    for exact in (False, True):
        model.exact = exact
        model.attention_over(attention.Tiles.of([segment], 2, "cpu"))
    assert asked == [False, True]
    weights = Weights(open_model(tiny_directory()), torch.float32, "cpu", "none", exact=True, weights_file=None)
    linear = weights.linear(torch.randn(8, 4))
    assert isinstance(linear, ExactLinear) and linear.exact


def test_command_line(tiny: str) -> None:
    done = invoke("run", "-m", tiny, "--exact", "--json", "--max-tokens", "5", "add")
    assert done.exit_code == 0 and json.loads(done.stdout)["exact"] is True
    assert invoke("check", "-m", tiny, "--exact").exit_code == 0
    for verb in (["run", "hello"], ["check"], ["tune", "--method", "layer_skip"]):
        wrong = invoke(*verb, "-m", tiny, "--exact", "--dtype", "bfloat16", "--device", "cpu")
        assert wrong.exit_code == 2 and "exact: on a CPU GEMMs in bfloat16 are not exact" in wrong.stderr
    for verb in ("run", "chat", "demo", "check", "tune"):
        assert "--exact" in invoke(verb, "--help").stdout
