"""Models with quantised weights: exact like the others, close to float32, and as small as they say."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.models import weights
from slipstream.models.decoder import Decoder
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.layers import quantized
from slipstream.models.load import load_model, weight_bytes
from slipstream.models.selfcheck import is_exact
from tests.models.test_exact_families import differing_nodes
from tests.models.test_families import FAMILIES, STORE, build
from tests.tiny import tiny_directory, tiny_draft, tiny_llm

MODES = ["int8", "int4"]
DRAFTERS: list[Any] = [
    "suffix:min_confidence=0,nodes=20",
    "ngram:max_n=2,min_n=1",
    "lookahead",
    {"method": "draft_model", "model": "tiny:1", "depth": 3, "branch": 2, "nodes": 9},
    "early_exit:exit=1,depth=4",
    {"method": "eagle3", "checkpoint": "head:eagle3", "depth": 3, "branch": 2, "nodes": 7},
    {"method": "medusa", "checkpoint": "head:medusa", "nodes": 12},
]
PROMPTS = [[5, 9, 17, 3] * 20, [1, 2, 3], [7] * 140, list(range(90))]


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_of_plain_decoding_with_any_drafter(mode: str) -> None:
    """Greedy and drawn, all requests in one batch; the cascade of shapes of a step gives no token another bit."""
    how = [SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 0.0, 1.0, 0.7)]
    llm = tiny_llm(context=300, characters=True, quantize=mode)
    assert llm.quantize == mode and llm.exact
    alone = [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, how, strict=True)]
    assert [output.token_ids for output in llm.generate(PROMPTS, how)] == alone
    for speculate in DRAFTERS:
        llm.use(tiny_draft(speculate))
        outputs = llm.generate(PROMPTS, how)
        assert [output.token_ids for output in outputs] == alone, speculate
        assert sum(output.stats.drafted for output in outputs) > 0 and not llm.engine.draft_faults, speculate


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["smollm2", "qwen2", "gemma2", "mixtral", "qwen3moe-dense"])
def test_tree_nodes_have_the_bits_of_plain_decoding(name: str, mode: str, tmp_path: Path) -> None:
    build(name, tmp_path, noise=0.15)
    model = load_model(tmp_path, dtype="float32", device="cpu", quantize=mode)[0]
    chooser = random.Random(5)
    with torch.inference_mode():
        assert is_exact(model)
        assert sum(differing_nodes(model, chooser, length) for length in (5, PAGE_SIZE - 3, 2 * PAGE_SIZE)) == 0


def prompt_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    cache = PagedCache(4)
    model.add_store(cache, STORE)
    table = cache.open([])
    cache.reserve(table, len(tokens))
    segment = tree_segment(table, 0, tokens, None)
    with torch.inference_mode():
        hidden = model.forward(cache, STORE, [segment]).hidden
        return model.head(hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_near_those_of_float32_in_every_family(name: str, tmp_path: Path) -> None:
    """And the fingerprint is that of the weights on disk: what was made for a model is found in every mode."""
    build(name, tmp_path)
    tokens = [random.Random(1).randrange(211) for _ in range(60)]
    models = {mode: load_model(tmp_path, dtype="float32", device="cpu", quantize=mode)[0] for mode in ("none", *MODES)}
    wide = prompt_logits(models["none"], tokens)
    for mode, share in (("int8", 0.03), ("int4", 0.35)):
        model = models[mode]
        error = (prompt_logits(model, tokens) - wide).norm(dim=1) / wide.norm(dim=1)
        assert error.median() < share, mode  # of a mixture some rows may choose another expert
        assert model.fingerprint == models["none"].fingerprint


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_take_the_memory_that_is_announced(tied: bool, mode: str, tmp_path: Path) -> None:
    build("qwen2", tmp_path, tie_word_embeddings=tied, intermediate_size=128, vocab_size=224)  # whole panels
    model, _ = load_model(tmp_path, dtype="float32", device="cpu", quantize=mode)
    announced = weight_bytes(model.config, model.dtype, mode)
    assert held_bytes(model) == announced < weight_bytes(model.config, model.dtype) / 3


def held_bytes(model: Decoder) -> int:
    """Of all tensors that hold weights; views of one are counted once.

    What all products share (a row of zeros, one of ones) and a number for each of them is no weight.
    """
    found: dict[int, int] = {}

    def walk(thing: Any) -> None:
        if isinstance(thing, torch.Tensor) and thing.numel() > 1 and not (thing == thing.flatten()[0]).all():
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple):
            for part in thing:
                walk(part)
        elif type(thing).__module__.startswith(("slipstream.models", "slipstream.native")):
            for part in vars(thing).values():
                walk(part)

    for part in (model._embed, model._head, model._norm, model.layers):
        walk(part)
    return sum(found.values())


@pytest.mark.parametrize("mode", MODES)
def test_only_the_matrices_at_hand_are_wide(mode: str, tmp_path: Path) -> None:
    """Weights are quantised as they are read: none of an earlier layer is left in float32 when the next is read."""
    build("qwen2", tmp_path)
    checkpoint = Watched(tmp_path)
    Decoder(checkpoint, torch.float32, "cpu", mode)
    assert checkpoint.most_left == 0 and len(checkpoint.seen) == 7 * 3 + 2


class Watched(HFCheckpoint):
    """Counts the matrices of other parts of the model that are still there when one is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seen: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self.most_left = 0

    def weight(self, name: str) -> torch.Tensor:
        part = name.rpartition(".")[0] or name
        self.most_left = max(self.most_left, sum(ref() is not None for other, ref in self.seen if other != part))
        weight = super().weight(name)
        if weight.dim() == 2:
            self.seen.append((part, weakref.ref(weight)))
        return weight


@pytest.fixture
def per_tensor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """8-bit products with one scale for all rows of a call, as libraries have them."""

    class PerTensor(quantized.Int8Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            unit = x.abs().max() / 127
            return super().__call__((x / unit).round() * unit)

    def make(mode: str, weight: torch.Tensor, bias: Any = None, columns: Any = None) -> PerTensor:
        return PerTensor(quantized.Int8Matrix(weight), bias, columns)

    monkeypatch.setattr(weights, "quantized_linear", make)
    yield


@pytest.mark.usefixtures("per_tensor")
def test_the_self_check_finds_a_product_whose_rows_depend_on_each_other() -> None:
    model, _ = load_model(tiny_directory(seed=5), dtype="float32", device="cpu", quantize="int8")
    assert not is_exact(model)


def test_the_self_check_looks_at_experts_after_dense_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen3moe-dense", tmp_path, noise=0.15)
    model, _ = load_model(tmp_path, dtype="float32", device="cpu", quantize="int8")
    assert is_exact(model)
    for layer in model.layers[1:]:
        for expert in layer.mlp._experts:
            down = expert.down
            monkeypatch.setattr(expert, "down", lambda x, down=down: down(x) * (1.0 + 1e-3 * (len(x) > 1)))
    assert not is_exact(model)


@pytest.mark.real_model
@pytest.mark.parametrize("mode", MODES)
def test_the_default_model_gives_the_same_text_with_a_drafter(mode: str, smollm2_path: Path) -> None:
    from slipstream import LLM

    llm = LLM(smollm2_path, speculate=None, quantize=mode, max_model_len=1024)
    assert llm.exact
    text = "The quick brown fox jumps over the lazy dog. "
    prompts = [text * 4, "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n", "The capital of France is"]
    how = SamplingParams(temperature=0.0, max_tokens=24)
    plain = [output.token_ids for output in llm.generate(prompts, how)]
    assert len({tuple(ids) for ids in plain}) == 3 and "Paris" in llm.generate(prompts[2], how)[0].text
    for speculate in ("suffix:min_confidence=0,nodes=40,depth=12", "lookahead", "early_exit:exit=6,depth=3"):
        llm.use(speculate)
        outputs = llm.generate(prompts, how)
        assert [output.token_ids for output in outputs] == plain, speculate
        assert sum(output.stats.drafted for output in outputs) > 0
